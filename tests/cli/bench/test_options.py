"""``toka-bench``'s options: wrong ones are named, and what the help shows can be typed."""

import json
import shlex
import sys

import pytest
import typer
from typer.testing import CliRunner

from services.cli.bench.app import app
from services.cli.bench.commands import latency, monkeys, serve

EXAMPLES = [
    example.removeprefix("toka-bench ") for command in (serve, monkeys, latency) for example in command.EXAMPLES
]


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
        ("serve --rate 3 --concurrency 2", "--rate and --concurrency"),
        ("serve --rate 0", "--rate"),
        ("serve --rate 0.001 --duration 0.001 --model m --seed 1", "nothing arrives"),
        ("serve --prompt-tokens none", "'none' is no length"),
        ("serve --prompt-tokens 9-3", "not above the last"),
        ("serve --output-tokens lognormal:5", "lognormal:99,1.2,2048"),
        ("serve --chat --vocab-size 9", "a chat's messages are text"),
        ("serve --extra-body [1]", "is no JSON object"),
        ("serve --dataset nowhere.jsonl", "nowhere.jsonl"),
        ("serve --dataset torn.jsonl", "torn.jsonl:2 is no JSON"),
        ("serve --dataset empty.jsonl", "has no rows"),
        ("serve --dataset chats.jsonl", "it has messages"),
        ("serve --dataset chats.jsonl --field messages", "add --chat"),
        ("serve --field question", "--field: has no effect without --dataset"),
        (
            "serve --chat --dataset chats.jsonl --field messages --prompt-tokens 9",
            "--prompt-tokens: has no effect with",
        ),
        ("serve --url 127.0.0.1:10210 --model m", "expected http://HOST:PORT"),
        ("serve --url http://host:port --model m", "expected http://HOST:PORT"),
        ("serve --json nowhere/out.json", "there is no directory nowhere"),
        ("serve --plot nowhere/out.png", "there is no directory nowhere"),
        ("serve --plot out.txt", "ends in .png"),
        ("monkeys --shots 2", "--shots: has no effect without --dataset"),
        ("monkeys --dataset gsm8k.jsonl --vocab-size 9", "--vocab-size: has no effect with --dataset"),
        ("monkeys --samples 8 --requests-per-problem 3", "does not divide"),
        ("monkeys --dataset chats.jsonl", "no 'question'"),
        ("latency --streams 1,x", "such as 1,8,64"),
        ("latency --sterams 1", "--streams"),
    ],
)
def test_a_wrong_option_is_named(arguments, said, here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    outcome = CliRunner().invoke(app, arguments.split())
    assert outcome.exit_code == 2, outcome.output
    assert said in outcome.output


def test_without_matplotlib_a_plot_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    outcome = CliRunner().invoke(app, ["serve", "--plot", "out.png"])
    assert outcome.exit_code == 2
    assert "pip install matplotlib" in outcome.output


def test_help_shows_what_to_type(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    for command in (serve, monkeys, latency):
        text = CliRunner().invoke(app, [command.__name__.rpartition(".")[2], "--help"]).output
        assert all(example in text for example in command.EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_can_be_typed(example, here):
    name, *arguments = shlex.split(example)
    commands = typer.main.get_command(app).commands
    assert commands[name].make_context(name, arguments).params
