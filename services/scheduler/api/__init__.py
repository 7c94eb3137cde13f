"""The gRPC side: requests in, news out. Runs on the asyncio loop, never on the step loop's thread."""
