"""``toka-bench monkeys``: repeated sampling (Brown et al. 2024, Large Language Monkeys)."""

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from services.cli.bench.commands.options import (
    ExistingFile,
    OutputTokens,
    PromptTokens,
    RequestFlags,
    ResultFlags,
    ServerFlags,
    Timeout,
    read,
)
from services.cli.bench.display import Live
from services.cli.bench.load import OfferedLoad
from services.cli.bench.problems import few_shot_prompts, read_problems
from services.cli.bench.prompts import Asking, Once, PromptLengths, Repeated, make_bodies
from services.cli.bench.run import BenchRun
from services.common.flags import Examples, Int, Needs


class MonkeysConfig(ServerFlags, RequestFlags, ResultFlags):
    """Request many samples of few prompts, all at once, to measure the worth of a shared prefix.

    The samples of a problem are one request's n, and come as whole answers. The rates are those of all samples, from
    the first request to the last answer.
    """

    examples: ClassVar[Examples] = (
        ("--problems 8 --samples 64", "made-up prompts"),
        (
            "--dataset gsm8k.jsonl --problems 32 --samples 1024 --output-tokens 1024 --clients 4",
            "problems of a file",
        ),
    )

    timeout: Timeout = 3600.0
    problems: Int = Field(8, ge=1, description="different prompts")
    samples: Int = Field(64, ge=1, description="samples of each")
    requests_per_problem: Int = Field(
        1, ge=1, description="requests that share the samples of a problem, for servers that limit n"
    )
    prompt_tokens: PromptTokens = PromptLengths(512, 512)
    output_tokens: OutputTokens = PromptLengths(128, 128)
    dataset: ExistingFile | None = Field(
        None, description="JSON lines with question and answer, as GSM8K's, instead of made-up prompts"
    )
    shots: Annotated[Int, Needs("dataset")] = Field(
        4, ge=0, description="solved problems of the dataset before each question"
    )

    @model_validator(mode="after")
    def _requests_share_the_samples(self) -> Self:
        if self.samples % self.requests_per_problem:
            raise ValueError(
                f"flag requests_per_problem={self.requests_per_problem}: does not divide samples={self.samples}; change"
                " one of them"
            )
        return self


def monkeys(config: MonkeysConfig) -> int:
    """Measure, show the figures, and return the exit status. Raises ``FlagError`` and ``ServerError``."""
    dataset, problems, samples, parts = config.dataset, config.problems, config.samples, config.requests_per_problem
    prompts = read(
        lambda: None if dataset is None else few_shot_prompts(read_problems(dataset), problems + 1, config.shots)
    )
    run = BenchRun.of("monkeys", config)
    fields = {"n": samples // parts} | config.fields(ignore_eos=prompts is None)
    if prompts is not None:
        fields = {"stop": ["Question:"]} | fields
    asking = Asking(run.model, stream=False, fields=fields)
    seed: int = run.settings["seed"]
    bodies = make_bodies(asking, seed, prompts, config.prompt_tokens, config.output_tokens, config.vocab_size)
    with Live(run.progress) as live:
        run.warm_up(live, Once(bodies), problems, 1)
        load = OfferedLoad(Repeated(bodies, parts), problems * parts)
        outcome = run.drive(live, f"{problems} x {samples} samples", load)
    title = f"{run.model} at {run.url}: {problems} problems x {samples} samples"
    return run.report(outcome, title, streamed=False)
