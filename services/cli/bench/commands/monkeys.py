"""``toka-bench monkeys``: repeated sampling (Brown et al. 2024, Large Language Monkeys)."""

import typer

from services.cli.bench.commands import options as its
from services.cli.bench.display import Live
from services.cli.bench.load import Load
from services.cli.bench.problems import few_shot_prompts, read_problems
from services.cli.bench.prompts import Asking, Lengths, Once, Repeated, made_up_or_read
from services.cli.bench.run import Run

EXAMPLES = (
    "toka-bench monkeys --problems 8 --samples 64",
    "toka-bench monkeys --dataset gsm8k.jsonl --problems 32 --samples 1024 --output-tokens 1024 --clients 4",
)
_PROMPT, _OUTPUT = Lengths(512, 512), Lengths(128, 128)


def monkeys(
    context: typer.Context,
    url: its.Url = its.DEFAULT_URL,
    model: its.Model = None,
    api_key: its.ApiKey = None,
    ca: its.Ca = None,
    timeout: its.Timeout = 3600.0,
    clients: its.Clients = 1,
    problems: its.Problems = 8,
    samples: its.Samples = 64,
    requests_per_problem: its.RequestsPerProblem = 1,
    prompt_tokens: its.PromptTokens = _PROMPT,
    output_tokens: its.OutputTokens = _OUTPUT,
    vocab_size: its.VocabSize = None,
    dataset: its.ProblemFile = None,
    shots: its.Shots = 4,
    ignore_eos: its.IgnoreEos = None,
    temperature: its.Temperature = 0.6,
    extra_body: its.ExtraBody = None,
    seed: its.Seed = None,
    json_to: its.Json = None,
    plot_to: its.Plot = None,
) -> None:
    """Many samples of few prompts, all asked for at once: what a shared prefix is worth.

    The samples of a problem are one request's n, and come as whole answers. The rates are those of all samples, from
    the first request to the last answer.
    """
    if samples % requests_per_problem:
        raise typer.BadParameter(f"--requests-per-problem {requests_per_problem} does not divide --samples {samples}")
    its.refuse_beside(context, dataset, "shots")
    prompts = its.read(
        lambda: None if dataset is None else few_shot_prompts(read_problems(dataset), problems + 1, shots)
    )

    run = Run.of("monkeys", context.params)
    eos = ignore_eos if ignore_eos is not None else prompts is None
    fields = {"n": samples // requests_per_problem} | its.fields(temperature, eos, extra_body)
    if prompts is not None:
        fields = {"stop": ["Question:"]} | fields
    asking = Asking(run.model, stream=False, fields=fields)
    drawn: int = run.settings["seed"]
    asked = made_up_or_read(asking, drawn, prompts, prompt_tokens, output_tokens, vocab_size)
    with Live(run.progress) as live:
        run.warm_up(live, Once(asked), problems, 1)
        load = Load(Repeated(asked, requests_per_problem), problems * requests_per_problem)
        outcome = run.drive(live, f"{problems} x {samples} samples", load)
    title = f"{run.model} at {run.url}: {problems} problems x {samples} samples"
    raise typer.Exit(run.tell(outcome, title, streamed=False))
