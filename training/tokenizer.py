"""The built-in model's tokenizer, its chat format, and documents as token ids.

A byte-level BPE: any text round-trips, because every byte is a token. Each digit is a token of its
own, so that the model can do arithmetic column by column.
"""

import json
import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.problems import Problem

VOCAB_SIZE = 2048
END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|end|>"
SPECIAL_TOKENS = [END_OF_TEXT, END_OF_TURN, "<|system|>", "<|user|>", "<|assistant|>"]
END_OF_TEXT_ID, END_OF_TURN_ID = 0, 1
FIRST_MERGED_ID = len(SPECIAL_TOKENS) + 256  # Tokens before it are special or a single byte.

# Words with at most one leading mark or space; single digits; runs of marks; line ends; spaces.
SPLIT_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] in ['system', 'developer'] -%}{{- '<|system|>' -}}
{%- elif message['role'] == 'user' -%}{{- '<|user|>' -}}
{%- elif message['role'] == 'assistant' -%}{{- '<|assistant|>' -}}
{%- else -%}{{- raise_exception('unknown role: ' + message['role']) -}}
{%- endif -%}
{%- if message['content'] is string -%}{{- message['content'] | trim -}}
{%- else -%}{%- for part in message['content'] -%}{{- part['text'] -}}{%- endfor -%}
{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

SYSTEM_MESSAGES = [
    "You are a helpful assistant.",
    "You are a careful maths tutor. Work step by step.",
    "Solve the problem and give the final number after ####.",
    "You are good at arithmetic.",
    "Answer with a worked solution.",
]

# Top bit of a packed uint16: the token belongs to a prompt, so that its loss weighs less.
PROMPT_BIT = 0x8000


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE of VOCAB_SIZE entries learned from `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, context: int) -> None:
    """Write the files that `AutoTokenizer.from_pretrained(directory)` reads."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def completion_prompt(question: str) -> str:
    """The plain format's prompt; the model goes on with ' ' and the worked answer."""
    return f"Question: {question}\nAnswer:"


def plain_parts(problem: Problem, rng: random.Random) -> list[tuple[str, bool]]:
    """One problem in the plain format, as (text, is_prompt) pieces."""
    prompt = completion_prompt(problem.question)
    if rng.random() < 0.1:  # A prompt may also end in a space.
        return [(prompt + " ", True), (problem.solution + END_OF_TEXT, False)]
    return [(prompt, True), (" " + problem.solution + END_OF_TEXT, False)]


def chat_parts(problems: list[Problem], rng: random.Random) -> list[tuple[str, bool]]:
    """One conversation with a problem a turn, as (text, is_prompt) pieces."""
    parts = []
    if rng.random() < 0.4:
        parts.append((f"<|system|>{rng.choice(SYSTEM_MESSAGES)}{END_OF_TURN}", True))
    for problem in problems:
        parts.append((f"<|user|>{problem.question}{END_OF_TURN}<|assistant|>", True))
        parts.append((problem.solution + END_OF_TURN, False))
    return parts


def pack_documents(problems: list[Problem], tokenizer: Tokenizer, row_length: int, rng: random.Random) -> np.ndarray:
    """Rows of whole documents, uint16 [rows, row_length].

    About 55 % of the documents are plain and 45 % chats, of which one in four has two turns. A
    document that does not fit starts a new row; what is left of a row is end-of-text marked as
    prompt. A document longer than a row is left out, and so is the last row.
    """
    documents: list[list[tuple[str, bool]]] = []
    index = 0
    while index < len(problems):
        if rng.random() < 0.55:
            documents.append(plain_parts(problems[index], rng))
            index += 1
        else:
            turns = 2 if rng.random() < 0.25 else 1
            documents.append(chat_parts(problems[index : index + turns], rng))
            index += turns
    texts = [text for parts in documents for text, _ in parts]
    encodings = iter(tokenizer.encode_batch_fast(texts))
    rows, row = [], []
    for parts in documents:
        ids: list[int] = []
        for _, is_prompt in parts:
            mark = PROMPT_BIT if is_prompt else 0
            ids.extend(token | mark for token in next(encodings).ids)
        if len(row) + len(ids) > row_length and row:
            rows.append(row + [END_OF_TEXT_ID | PROMPT_BIT] * (row_length - len(row)))
            row = []
        if len(ids) <= row_length:
            row = row + ids
    return np.array(rows, dtype=np.uint16).reshape(-1, row_length)
