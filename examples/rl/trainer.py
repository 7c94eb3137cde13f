"""A trainer over gRPC: ``python trainer.py ADDRESS DIRECTORY MODEL STEPS``, with ``toka weight_directories=DIRECTORY``.

It rewards right answers to one question.
"""

import shutil
import sys
from pathlib import Path

import grpc
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tokasaurus.scheduler.v1 import control_pb2, generate_pb2, scheduler_pb2_grpc

PROMPT = "Question: Tom buys 3 books for $7 each and 4 pens for $2 each. How much does he pay?\nAnswer:"
RIGHT = "#### 29"
GROUP, TEMPERATURE = 16, 2.5


def sample(scheduler, prompt: list[int], version: str) -> list[list[int]]:
    """Return a group of answers, as token ids. Raises RuntimeError if other weights than ``version`` answered."""
    request = generate_pb2.GenerateRequest(tokens=generate_pb2.TokenPrompt(token_ids=prompt), n=GROUP)
    request.sampling.MergeFrom(generate_pb2.Sampling(temperature=TEMPERATURE, top_p=1, top_k=0))
    request.stopping.max_tokens = 128
    answers: list[list[int]] = [[] for _ in range(GROUP)]
    for message in scheduler.Generate(request):
        for output in message.outputs.samples:
            answer = answers[output.sample_index]
            answer += output.token_ids
            spans = [(span.version, span.tokens) for span in output.finish.weights]
            if output.HasField("finish") and spans != [(version, len(answer))]:
                raise RuntimeError(f"{spans} answered, and not {version}")
    return answers


def push(scheduler, model, directory: Path) -> None:
    """Replace the server's weights by those of ``model``. Their version is the name of ``directory``."""
    model.save_pretrained(directory)
    staging = control_pb2.StageWeightsRequest(directory=str(directory), version=directory.name)
    staged = scheduler.StageWeights(staging)
    scheduler.CommitWeights(control_pb2.CommitWeightsRequest(update_id=staged.update_id))


def loss(model, prompt: list[int], answers: list[list[int]], rewards: torch.Tensor) -> torch.Tensor:
    """Return the loss of REINFORCE, with the group's mean reward as the baseline."""
    parts = []
    for answer, advantage in zip(answers, rewards - rewards.mean(), strict=True):
        tokens = torch.tensor([prompt + answer])
        logits = model(tokens).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        logprobs = logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])
        parts.append(-advantage * logprobs.mean())
    return torch.stack(parts).mean()


def main(address: str, directory: Path, checkpoint: str, steps: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    prompt = tokenizer(PROMPT)["input_ids"]
    with grpc.insecure_channel(address) as channel:
        scheduler = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        for step in range(steps):
            push(scheduler, model, directory / f"step-{step}")
            shutil.rmtree(directory / f"step-{step - 1}", ignore_errors=True)  # the server needs only the present one
            answers = sample(scheduler, prompt, f"step-{step}")
            rewards = torch.tensor([float(RIGHT in tokenizer.decode(answer)) for answer in answers])
            print(f"step {step}: {rewards.mean():.2f} of the answers are right", flush=True)
            loss(model, prompt, answers, rewards).backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
