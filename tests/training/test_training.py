"""The problems, their variants, the tokenizer, and very short training runs of both architectures."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tokenizers import Tokenizer  # noqa: E402

from services.common.model.files import BUILTIN_MODELS  # noqa: E402
from tests.quick import quick_if  # noqa: E402
from training.augment import ANNOTATION, Template, is_consistent, rename_people, to_number  # noqa: E402
from training.corpus import held_out_generated  # noqa: E402
from training.evaluate import evaluate, pass_at_k  # noqa: E402
from training.experts import route  # noqa: E402
from training.measure import card_rows, describe_shares, expert_shares, measure  # noqa: E402
from training.model import LanguageModel, ModelConfig  # noqa: E402
from training.model_files import load_model  # noqa: E402
from training.muon import StackedMuon  # noqa: E402
from training.problems import Problem, Story, evaluate_expression, final_number, format_number  # noqa: E402
from training.scenarios import SCENARIOS, generate_problem  # noqa: E402
from training.tokenizer import PROMPT_BIT, pack_documents, train_tokenizer  # noqa: E402
from training.train import SHAPES, Settings, mixture, train  # noqa: E402

CLIPS = Problem(
    "Tom sold clips to 48 of his friends in April, and then he sold half as many clips in May. "
    "How many clips did Tom sell altogether in April and May?",
    "Tom sold 48/2 = <<48/2=24>>24 clips in May.\nTom sold 48+24 = <<48+24=72>>72 clips altogether.\n#### 72",
)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute with one thread: the matrices are so small that several threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


def test_a_stack_of_matrices_is_updated_as_each_of_them_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((4, 24, 16), (4, 16, 24)):
        start = torch.randn(shape, generator=generator)
        stack = torch.nn.Parameter(start.clone())
        alone = [torch.nn.Parameter(matrix.clone()) for matrix in start]
        ours = StackedMuon([stack], lr=0.01, weight_decay=0.1)
        reference = torch.optim.Muon(alone, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        for _ in range(3):
            stack.grad = torch.randn(shape, generator=generator)
            for matrix, gradient in zip(alone, stack.grad, strict=True):
                matrix.grad = gradient.clone()
            ours.step()
            reference.step()
        moved = torch.stack([matrix.detach() for matrix in alone]) - start
        assert moved.abs().mean() > 0.001
        # The products are in bfloat16 and are rounded in another order.
        torch.testing.assert_close(stack.detach() - start, moved, rtol=0.05, atol=0.002)


def test_the_balance_loss_is_one_for_equal_shares_and_the_number_of_experts_for_one_expert() -> None:
    weights, balance = route(torch.eye(8) * 1e-4, 1)
    assert weights.tolist() == torch.eye(8).tolist()
    assert balance.item() == pytest.approx(1.0, abs=1e-3)
    weights, balance = route(torch.tensor([[0.0, 50.0, 0.0, 0.0]] * 3), 1)
    assert weights.tolist() == [[0.0, 1.0, 0.0, 0.0]] * 3
    assert balance.item() == pytest.approx(4.0)


def test_the_chosen_experts_weights_sum_to_one() -> None:
    weights, _ = route(torch.randn(50, 16, generator=torch.Generator().manual_seed(0)), 4)
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(50))
    assert ((weights > 0).sum(dim=1) == 4).all()


SMALL = ModelConfig(hidden_size=64, intermediate_size=96, layers=2, heads=4, kv_heads=2, head_dim=32)
SMALL_SHAPES = {
    "dense": SMALL,
    "experts": replace(SMALL, intermediate_size=16, norm_eps=1e-6, experts=16, experts_per_token=4),
}


@pytest.fixture(scope="module", params=quick_if(lambda shape: shape == "dense", SMALL_SHAPES))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory written by two steps of training on a few problems."""
    data, out = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("model")
    records = [{"question": CLIPS.question, "answer": CLIPS.solution}] * 320
    (data / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    shape = SMALL_SHAPES[request.param]
    settings = Settings(
        data, out, "cpu", workers=1, batch_rows=8, generated=40, resampled=40, original=40, steps=2, shape=shape
    )
    lines: list[str] = []
    train(settings, lines.append)
    assert any("balance" in line for line in lines) == bool(shape.experts)
    return out


def test_a_model_that_is_not_built_in_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model='other' is not a built-in model: give one of builtin, builtin-moe"):
        train(Settings(tmp_path, tmp_path, "cpu", model="other"))


def check_logits(directory: Path) -> None:
    """The model here and the one of transformers agree in float32."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model: LanguageModel = load_model(directory).eval()
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
    tokenizer = Tokenizer.from_file(str(trained / "tokenizer.json"))
    scores, firsts = evaluate(load_model(trained).eval(), tokenizer, [CLIPS], 2, 0.8, False, 0)
    assert scores.keys() == {1}
    assert len(firsts) == 1


def test_the_rows_of_a_card_are_measured(tmp_path: Path) -> None:
    record = json.dumps({"question": CLIPS.question, "answer": CLIPS.solution}) + "\n"
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text(record * 2)
    rows = card_rows(tmp_path, 1)
    assert {row.name for row in rows if row.problems == [CLIPS]} >= {"GSM8K test", "GSM8K train, held out"}
    model = LanguageModel(replace(SMALL_SHAPES["experts"], context=256)).eval()
    tokenizer = train_tokenizer([CLIPS.question, CLIPS.solution])
    greedy, sampled = (measure(row, model, tokenizer, 2) for row in rows[:2])
    assert (greedy["temperature"], greedy["samples"], sampled["samples"]) == (0.0, 1, 2)
    assert 0 <= sampled["pass@1"] <= 100


def test_the_shares_of_experts_sum_to_one_in_each_layer() -> None:
    model = LanguageModel(SMALL_SHAPES["experts"]).eval()
    shares = expert_shares(model, torch.arange(300).view(2, 150))
    assert shares.shape == (2, 16)
    torch.testing.assert_close(shares.sum(dim=1), torch.ones(2))
    described = describe_shares(torch.tensor([[0.25, 0.75], [0.5, 0.5]]))
    assert (described["equal"], described["least"], described["largest"]) == (50.0, [25.0, 50.0], [75.0, 50.0])


@pytest.mark.parametrize(("name", "most_bytes"), [("builtin", 16_000_000), ("builtin-moe", 12_000_000)])
def test_built_in_model(name: str, most_bytes: int) -> None:
    directory = BUILTIN_MODELS[name]
    assert (directory / "model.safetensors").stat().st_size <= most_bytes
    assert load_model(directory).config == replace(SHAPES[name], dropout=0.0)
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
