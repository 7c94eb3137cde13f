"""Files and batches: OpenAI's ``/v1/files`` and ``/v1/batches`` over a store that several gateways may share.

``tables``, ``store`` and ``blobs`` keep what must not be lost; ``files``, ``batches`` and ``responses`` (those of
``/v1/responses``) are its records; ``leases`` says who works on what; ``validation``, ``executor`` and ``finishing``
take a batch from its file to its results.
"""
