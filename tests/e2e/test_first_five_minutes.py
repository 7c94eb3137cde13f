"""What the README tells a newcomer to type."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()


def snippets(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def at(server, code: str) -> str:
    """``code`` with the README's addresses replaced by those of ``server``."""
    base, grpc = server.base_url.removeprefix("http://"), server.grpc_address
    return code.replace("127.0.0.1:10210", base).replace("127.0.0.1:10310", grpc)


@pytest.mark.parametrize("code", snippets("python"), ids=["openai", "llm", "grpc"])
def test_a_python_snippet_prints_an_answer(builtin_server, code):
    outcome = subprocess.run(
        [sys.executable, "-c", at(builtin_server, code)], capture_output=True, text=True, check=True
    )
    assert outcome.stdout.strip()


def test_the_curl_line_answers(builtin_server):
    (code,) = [code for code in snippets("sh") if code.startswith("curl")]
    outcome = subprocess.run(at(builtin_server, code), shell=True, capture_output=True, text=True, check=True)
    assert json.loads(outcome.stdout)["choices"][0]["message"]["content"].strip()


def test_the_readme_names_only_files_that_exist():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (Path(__file__).parents[2] / link).exists()] == []
