"""Random bodies around the schemas: an answer or a 4xx, never a 5xx."""

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gateway.openai.schemas import ChatBody, CompletionBody
from services.gateway.openai.unsupported import UNSUPPORTED
from tests.gateway.deployment import PATIENCE_S
from tests.properties import examples

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 30),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from([2**31, 2**32, 2**63, 2**64, -(2**63), 1e308, "auto", "text"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
# Values that are right often enough to get past the first check.
likely = {
    "prompt": st.one_of(
        st.text(max_size=20), st.lists(st.integers(0, 2100), max_size=5), st.lists(st.text(max_size=5), max_size=3)
    ),
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": st.text(max_size=20)}
        ),
        max_size=3,
    ),
    "model": st.none(),
    "n": st.integers(1, 4),
    "stream": st.booleans(),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "stop": st.lists(st.text(max_size=3), max_size=3),
    "logit_bias": st.dictionaries(st.integers(0, 3000).map(str), st.floats(-100, 100), max_size=3),
    "max_tokens": st.integers(1, 6),
}


def bodies(schema):
    def value(name):
        return likely[name] | values if name in likely else values

    required = {name: value(name) for name, field in schema.model_fields.items() if field.is_required()}
    names = sorted({*schema.model_fields, *UNSUPPORTED, "unknown"} - required.keys())

    def body_with(chosen):
        return st.fixed_dictionaries(required | {name: value(name) for name in chosen})

    return st.lists(st.sampled_from(names), max_size=4, unique=True).flatmap(body_with).map(short_answer)


def short_answer(body):
    """Whatever else is asked for, the answer must not take long."""
    length = {} if "max_tokens" in body and "messages" not in body else {"max_tokens": 3}
    return length | body | ({"max_completion_tokens": 3} if "messages" in body else {})


@pytest.mark.hypothesis
@pytest.mark.parametrize(("path", "schema"), [("/v1/completions", CompletionBody), ("/v1/chat/completions", ChatBody)])
def test_random_bodies_never_break_the_server(deployment, path, schema):
    with httpx.Client(base_url=deployment.url, timeout=PATIENCE_S) as client:

        @settings(max_examples=examples(200), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(st.one_of(values, *[bodies(schema)] * 4))
        def check(body):
            response = client.post(path, json=body)
            assert response.status_code < 500, (body, response.text)
            if response.status_code >= 400:
                assert response.json()["error"]["message"]

        check()
