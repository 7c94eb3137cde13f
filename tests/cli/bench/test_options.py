"""``toka-bench``'s options: wrong ones are named, and what the help shows can be typed."""

import json
import shlex
import sys

import pytest

from services.cli.bench.app import COMMANDS, main
from services.common.flags import load
from tests.cli.running import run

EXAMPLES = [(name, arguments) for name, kind in COMMANDS.items() for arguments, _ in kind.examples]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The files that tests name; and no server is asked for its model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) + "\n")
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "2\n#### 2"}) + "\n")
    (tmp_path / "torn.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    (tmp_path / "empty.jsonl").write_text("\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("serve --rate 3 --concurrency 2", "flag rate=3.0: has no effect with concurrency=2; leave one of them out"),
        ("serve --rate 0", "flag rate='0': input should be greater"),
        ("serve --rate 0.001 --duration 0.001 --model m --seed 1", "no request arrives"),
        ("serve --prompt-tokens none", "'none' is no length"),
        ("serve --prompt-tokens 9-3", "the smaller one first"),
        ("serve --output-tokens lognormal:5", "lognormal:99,1.2,2048"),
        ("serve --chat --vocab-size 9", "flag vocab_size=9: has no effect with chat=T"),
        ("serve --extra-body [1]", "is no JSON object"),
        ("serve --dataset nowhere.jsonl", "nowhere.jsonl"),
        ("serve --dataset torn.jsonl", "torn.jsonl:2 is no JSON"),
        ("serve --dataset empty.jsonl", "has no rows"),
        ("serve --dataset chats.jsonl", "it has messages"),
        ("serve --dataset chats.jsonl --field messages", "add --chat"),
        ("serve --field question", "flag field=question: has no effect without dataset="),
        (
            "serve --chat --dataset chats.jsonl --field messages --prompt-tokens 9",
            "flag prompt_tokens=9: has no effect with dataset=chats.jsonl",
        ),
        ("serve --url 127.0.0.1:10210 --model m", "expected http://HOST:PORT"),
        ("serve --url http://host:port --model m", "expected http://HOST:PORT"),
        ("serve --json nowhere/out.json", "there is no directory nowhere"),
        ("serve --plot nowhere/out.png", "there is no directory nowhere"),
        ("serve --plot out.txt", "ends in .png"),
        ("monkeys --shots 2", "flag shots=2: has no effect without dataset="),
        ("monkeys --dataset gsm8k.jsonl --vocab-size 9", "flag vocab_size=9: has no effect with dataset=gsm8k.jsonl"),
        ("monkeys --samples 8 --requests-per-problem 3", "does not divide"),
        ("monkeys --dataset chats.jsonl", "no 'question'"),
        ("latency --streams 1,x", "such as 1,8,64"),
        ("latency --sterams 1", "did you mean streams="),
        ("serve rate=3 --requests=0", "flag requests='0'"),
        ("sevre --rate 1", "unknown command 'sevre': the commands are serve, monkeys, latency"),
    ],
)
def test_a_wrong_option_is_named(arguments, said, here):
    outcome = run(main, *arguments.split())
    assert outcome.status == 2, outcome.output
    assert said in outcome.stderr


def test_without_matplotlib_a_plot_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    outcome = run(main, "serve", "--plot", "out.png")
    assert outcome.status == 2
    assert "pip install matplotlib" in outcome.output


def test_help_shows_what_to_type():
    commands = run(main, "--help")
    assert commands.status == 0
    assert all(f"  {name} " in commands.stdout for name in COMMANDS)
    for name, kind in COMMANDS.items():
        text = run(main, name, "--help", environment={"COLUMNS": "160"}).stdout
        assert all(arguments in text for arguments, _ in kind.examples)
        assert all(f"  {flag}=" in text for flag in kind.fields_by_flag())
        assert "TOKA_API_KEY or OPENAI_API_KEY sets api_key" in text


@pytest.mark.parametrize(("name", "arguments"), EXAMPLES)
def test_an_example_can_be_typed(name, arguments, here):
    assert load(COMMANDS[name], shlex.split(arguments), {})


def test_only_the_key_comes_from_the_environment():
    """The other variables are those of the services: a server on another host has another model."""
    environment = {"TOKA_MODEL": "/models/M", "OPENAI_API_KEY": "a", "TOKA_API_KEY": "b"}
    config = load(COMMANDS["serve"], [], environment)
    assert (config.model, config.api_key) == (None, "b")
