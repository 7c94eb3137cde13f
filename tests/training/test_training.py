"""The problems, their variants, the tokenizer and a very short training run."""

import json
import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from training.augment import ANNOTATION, Template, is_consistent, rename_people, to_number  # noqa: E402
from training.corpus import held_out_generated  # noqa: E402
from training.evaluate import evaluate, pass_at_k  # noqa: E402
from training.model import Llama, ModelConfig, load_model  # noqa: E402
from training.problems import Problem, Story, evaluate_expression, final_number, format_number  # noqa: E402
from training.scenarios import SCENARIOS, generate_problem  # noqa: E402
from training.tokenizer import PROMPT_BIT, pack_documents, train_tokenizer  # noqa: E402
from training.train import Settings, mixture, train  # noqa: E402

CLIPS = Problem(
    "Tom sold clips to 48 of his friends in April, and then he sold half as many clips in May. "
    "How many clips did Tom sell altogether in April and May?",
    "Tom sold 48/2 = <<48/2=24>>24 clips in May.\nTom sold 48+24 = <<48+24=72>>72 clips altogether.\n#### 72",
)
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_generated_arithmetic_is_right(scenario) -> None:
    rng = random.Random(scenario.__name__)
    written = 0
    for _ in range(60):
        story = Story(rng)
        try:
            scenario(story)
        except ValueError:  # The scenario gives up on a quantity that is not sensible.
            continue
        problem = story.problem()
        steps = ANNOTATION.findall(problem.solution)
        assert all(evaluate_expression(left) == to_number(right) for left, right in steps)
        assert problem.answer == steps[-1][1] == final_number(problem.solution)
        assert problem.question[0].isupper() or problem.question[0].isdigit()
        assert "@" not in problem.question + problem.solution
        written += 1
    assert written > 30


def test_generation_follows_the_seed() -> None:
    assert held_out_generated(5) == held_out_generated(5)
    first, second = (generate_problem(random.Random(seed)) for seed in (1, 2))
    assert first != second


def test_resampling_keeps_question_and_answer_together() -> None:
    template = Template.parse(CLIPS)
    assert template is not None
    assert template.free == (48,)
    rng = random.Random(0)
    seen = set()
    for _ in range(50):
        problem = template.resample(rng)
        assert problem is not None
        assert is_consistent(problem)
        april = int(problem.question.split(" to ")[1].split()[0])
        assert f"{april}/2 = <<{april}/2={april // 2}>>{april // 2}" in problem.solution
        assert problem.answer == str(april + april // 2)
        seen.add(april)
    assert len(seen) > 10


@pytest.mark.parametrize(
    "solution",
    [
        "He sold 48/3 = <<48/3=16>>16.\n#### 16",  # 3 comes from nowhere.
        "He sold 48/2 = <<48/2=25>>25.\n#### 25",  # Wrong.
        "He sold 48/2 = <<48/2=24>>24.\n#### 30",  # The answer is not a result.
    ],
)
def test_unclear_arithmetic_is_refused(solution: str) -> None:
    assert Template.parse(Problem(CLIPS.question, solution)) is None


def test_renaming_is_consistent() -> None:
    renamed = rename_people(CLIPS, random.Random(3))
    name = renamed.question.split()[0]
    assert name != "Tom"
    assert renamed.question.replace(name, "Tom") == CLIPS.question
    assert renamed.solution.replace(name, "Tom") == CLIPS.solution


def test_numbers() -> None:
    assert evaluate_expression("(20-05)*.5") == 7.5
    assert format_number(evaluate_expression("1/4")) == "0.25"
    with pytest.raises(ValueError, match="decimals"):
        format_number(evaluate_expression("1/3"))
    with pytest.raises(ValueError, match="plain"):
        evaluate_expression("__import__('os')")
    assert final_number("so\n#### $1,250.50") == "1250.50"
    assert final_number("no answer") is None


def test_pass_at_k() -> None:
    assert pass_at_k(10, 0, 5) == 0.0
    assert pass_at_k(10, 10, 1) == 1.0
    assert pass_at_k(4, 1, 1) == pytest.approx(0.25)
    assert pass_at_k(4, 1, 4) == 1.0


def test_mixture_is_a_distribution() -> None:
    for progress in (0.0, 0.5, 0.9, 1.0):
        assert sum(mixture(progress).values()) == pytest.approx(1.0)


def test_tokenizer_round_trips_any_text() -> None:
    tokenizer = train_tokenizer(p.question for p in held_out_generated(200))
    rng = random.Random(0)
    texts = ["", "héllo \U0001f642 \x00 中文\r\n\n  a\tb ", "<<48/2=24>>24"]
    texts += ["".join(chr(rng.randrange(1, 0xD800)) for _ in range(50)) for _ in range(50)]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.encode("1234").tokens == list("1234")


def test_packed_rows_hold_whole_documents() -> None:
    problems = held_out_generated(40)
    tokenizer = train_tokenizer(p.question for p in problems)
    rows = pack_documents(problems, tokenizer, 512, random.Random(0))
    assert rows.shape[1] == 512
    answers = [int(token) for token in rows.flatten() if not token & PROMPT_BIT]
    assert "#### " in tokenizer.decode(answers)
    for row in rows:  # Every row begins with a prompt.
        assert row[0] & PROMPT_BIT


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory written by two steps of training on a few problems."""
    data, out = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("model")
    records = [{"question": CLIPS.question, "answer": CLIPS.solution}] * 320
    (data / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    shape = ModelConfig(hidden_size=64, intermediate_size=96, layers=2, heads=4, kv_heads=2, head_dim=32)
    settings = Settings(
        data, out, "cpu", workers=1, batch_rows=8, generated=40, resampled=40, original=40, steps=2, shape=shape
    )
    train(settings, lambda line: None)
    return out


def check_logits(directory: Path) -> None:
    """The model here and the one of transformers agree in float32."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model: Llama = load_model(directory).eval()
    tokens = torch.randint(0, 256, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), reference(tokens).logits, rtol=1e-4, atol=1e-4)


def test_training_writes_what_transformers_loads(trained: Path) -> None:
    check_logits(trained)
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained)
    messages = [{"role": "system", "content": "Hi."}, {"role": "user", "content": "2+2?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|system|>Hi.<|end|><|user|>2+2?<|end|><|assistant|>"


def test_evaluation_runs(trained: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(trained / "tokenizer.json"))
    scores, firsts = evaluate(load_model(trained).eval(), tokenizer, [CLIPS], 2, 0.8, False, 0)
    assert scores.keys() == {1}
    assert len(firsts) == 1


def test_built_in_model() -> None:
    directory = ROOT / "services" / "common" / "builtin_model"
    assert (directory / "model.safetensors").stat().st_size <= 16_000_000
    check_logits(directory)
    ends = json.loads((directory / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [0, 1]


def test_benchmark_problems() -> None:
    lines = (ROOT / "bench" / "data" / "coverage_problems.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["source"] for record in records] == ["gsm8k-test"] * 60 + ["generated"] * 40
    for record in records:
        assert Problem(record["question"], record["solution"]).answer == record["answer"]
    assert [r["question"] for r in records[60:]] == [p.question for p in held_out_generated(40)]
