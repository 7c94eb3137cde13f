"""Measures how often sampled answers are right: pass@k.

    python -m training.evaluate model=DIR problems=FILE [samples=100] [temperature=0.8]
        [limit=200] [device=cuda] [chat=0] [seed=0]

FILE has a JSON object a line: GSM8K's own fields, or those of the benchmark's problems. The word
`generated` in place of FILE stands for the generated problems that are kept for measuring.
"""

import json
import sys
import time
from math import comb
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.corpus import held_out_generated
from training.model import LanguageModel
from training.model_files import load_model
from training.problems import Problem, final_number
from training.tokenizer import END_OF_TEXT_ID, END_OF_TURN_ID, completion_prompt


def load_problems(name: str, limit: int) -> list[Problem]:
    """Return the first `limit` problems of a file, or of the held-out generated problems."""
    if name == "generated":
        return held_out_generated(limit)
    records = [json.loads(line) for line in Path(name).read_text(encoding="utf-8").splitlines()]
    return [Problem(r["question"], r.get("solution", r["answer"])) for r in records[:limit]]


@torch.inference_mode()
def sample_answers(
    model: LanguageModel,
    prompts: list[list[int]],
    samples: int,
    temperature: float,
    context: int,
    generator: torch.Generator,
) -> Tensor:
    """Return `samples` continuations of every prompt, int64 [prompts, samples, context] on the CPU.

    All sequences go through the positions together, each fed its prompt's token as long as there
    is one and its own sampled token after that; so no padding or mask is needed. An answer ends
    with its first end-of-text or end-of-turn; temperature 0 takes the likeliest token.
    """
    device = model.cos.device
    forced = torch.full((len(prompts), context), -1, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        forced[row, : len(prompt)] = torch.tensor(prompt)
    forced = forced.to(device).repeat_interleave(samples, dim=0)
    tokens = forced.clone()
    done = torch.zeros(len(tokens), dtype=torch.bool, device=device)
    cache = model.new_cache(len(tokens), context, torch.bfloat16)
    for position in range(context - 1):
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(tokens[:, position : position + 1], cache, position)[:, 0].float()
        if temperature > 0:
            probabilities = torch.softmax(logits / temperature, dim=-1)
            chosen = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
        else:
            chosen = logits.argmax(dim=-1)
        given = forced[:, position + 1]
        chosen = torch.where(done, END_OF_TEXT_ID, chosen)
        tokens[:, position + 1] = torch.where(given >= 0, given, chosen)
        ended = (chosen == END_OF_TEXT_ID) | (chosen == END_OF_TURN_ID)
        done |= ended & (given < 0)
        if position % 32 == 0 and bool(done.all()):
            tokens[:, position + 2 :] = END_OF_TEXT_ID
            break
    return tokens.view(len(prompts), samples, context).cpu()


def count_right(problem: Problem, answers: list[str]) -> int:
    """Return the number of answers that end in the right number."""
    right = float(problem.answer)
    numbers = (final_number(answer) for answer in answers)
    return sum(number is not None and abs(float(number) - right) < 1e-6 for number in numbers)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of k samples is right."""
    return 1.0 - comb(samples - right, k) / comb(samples, k)


def evaluate(
    model: LanguageModel,
    tokenizer: Tokenizer,
    problems: list[Problem],
    samples: int,
    temperature: float,
    chat: bool,
    seed: int,
) -> tuple[dict[int, float], list[str]]:
    """Return pass@k for k of 1, 10, 100, ... up to `samples`, and the first answer to each problem."""
    texts = [f"<|user|>{p.question}<|end|><|assistant|>" if chat else completion_prompt(p.question) for p in problems]
    prompts = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    context = min(model.config.context, max(map(len, prompts)) + 400)
    generator = torch.Generator(model.cos.device).manual_seed(seed)
    tokens = sample_answers(model, prompts, samples, temperature, context, generator)
    rights, firsts = [], []
    for problem, prompt, rows in zip(problems, prompts, tokens, strict=True):
        answers = [tokenizer.decode(row) for row in cut_answers(rows, len(prompt))]
        rights.append(count_right(problem, answers))
        firsts.append(answers[0])
    ks = [k for k in (1, 10, 100, 1000) if k <= samples]
    scores = {k: sum(pass_at_k(samples, r, k) for r in rights) / len(rights) for k in ks}
    return scores, firsts


def cut_answers(rows: Tensor, start: int) -> list[list[int]]:
    """Return each row's tokens from `start` to before its first end; rows int64 [samples, context]."""
    answers = []
    for row in rows[:, start:].tolist():
        ends = (i for i, token in enumerate(row) if token in (END_OF_TEXT_ID, END_OF_TURN_ID))
        answers.append(row[: next(ends, len(row))])
    return answers


def main() -> None:
    """Print pass@k and two worked answers."""
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    directory = Path(options["model"])
    model = load_model(directory).to(options.get("device", "cuda")).eval()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    problems = load_problems(options["problems"], int(options.get("limit", 200)))
    samples, temperature = int(options.get("samples", 100)), float(options.get("temperature", 0.8))
    chat, seed = options.get("chat", "0") == "1", int(options.get("seed", 0))
    started = time.monotonic()
    scores, firsts = evaluate(model, tokenizer, problems, samples, temperature, chat, seed)
    shown = ", ".join(f"pass@{k} {100 * score:.1f} %" for k, score in scores.items())
    print(f"{Path(options['problems']).name}: {len(problems)} problems, {samples} samples,", end=" ")
    print(f"temperature {temperature}: {shown} ({time.monotonic() - started:.0f} s)")
    for problem, answer in list(zip(problems, firsts, strict=True))[:2]:
        print(f"  Q: {problem.question}\n  A: {answer}\n  right answer: {problem.answer}")


if __name__ == "__main__":
    main()
