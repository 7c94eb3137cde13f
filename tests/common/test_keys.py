"""API keys: found by their hash, read again when the file changes, refused when it is wrong."""

import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from services.common.errors import InvalidRequest
from services.common.flags import load
from services.common.host import file_watch
from services.common.keys import Key, KeyRing, hash_of, new_key, salted
from services.gateway.http.new_key import NewKeyConfig
from services.gateway.http.new_key import entry as entry_of


def entry(name: str, key: str, *lines: str) -> str:
    return "\n".join(["[[keys]]", f'name = "{name}"', f'hash = "{hash_of(key)}"', *lines, ""])


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(file_watch, "CHECK_EVERY_S", 0.0)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.toml"


def test_a_key_is_found_and_says_what_it_may(path):
    path.write_text(
        entry("a", "one") + entry("b", "two", 'scopes = ["admin", "inference"]', "max_concurrent = 3",
                                  "tokens_per_minute = 1000", "expires = 2999-01-01")
    )  # fmt: skip
    ring = KeyRing.load(path)
    found = ring.find("two")
    assert (found.name, found.scopes) == ("b", {"admin", "inference"})
    assert (found.max_concurrent, found.tokens_per_minute) == (3, 1000)
    assert ring.find("one").scopes == {"inference"}
    for wrong in ("three", "", hash_of("one"), "one ", "\udce9"):
        assert ring.find(wrong) is None


def test_neither_a_key_nor_its_hash_is_shown(path):
    path.write_text(entry("a", "secret"))
    assert hash_of("secret")[-8:] not in repr(KeyRing.load(path).keys)


@pytest.mark.parametrize(("days", "lets_in"), [(-1, False), (0, False), (1, True)])
def test_a_key_ends_with_the_day_before_it_expires(path, days, lets_in):
    day = (datetime.now(UTC) + timedelta(days=days)).date()
    path.write_text(entry("a", "one", f"expires = {day}"))
    assert (KeyRing.load(path).find("one") is not None) is lets_in


def test_while_one_key_replaces_another_both_are_right(path):
    path.write_text(f'[[keys]]\nname = "a"\nhash = ["{hash_of("old")}", "{hash_of("new")}"]\n')
    ring = KeyRing.load(path)
    assert ring.find("old") is ring.find("new") is not None


def test_a_file_that_changes_is_read_again_and_a_wrong_one_changes_nothing(path, at_once):
    path.write_text(entry("a", "one"))
    ring = KeyRing.load(path)
    assert not ring.refresh()
    path.write_text(entry("a", "another"))
    assert ring.refresh()
    assert (ring.find("one"), ring.find("another").name) == (None, "a")
    path.write_text("[[keys]]\nname = ")
    assert not ring.refresh()
    path.unlink()
    assert not ring.refresh()
    assert ring.find("another").name == "a"
    path.write_text(entry("a", "one"))
    assert ring.refresh()
    assert ring.find("one").name == "a"


def test_the_file_is_looked_at_once_a_second(path):
    path.write_text(entry("a", "one"))
    ring = KeyRing.load(path)
    path.write_text(entry("a", "another"))
    assert not ring.refresh()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "keys: Field required"),
        ("keys = []", "at least 1 item"),
        ("[[keys]]", "name"),
        ("what", "is not TOML"),
        ('[[keys]]\nname = "a"\nhash = "the key itself"', "sha256: and 64"),
        (entry("a b", "one"), "keys.0.name"),
        (entry("a", "one", 'scopes = ["root"]'), "keys.0.scopes"),
        (entry("a", "one", "max_concurrent = 0"), "keys.0.max_concurrent"),
        (entry("a", "one", "tokens_per_second = 1"), "keys.0.tokens_per_second"),
        (entry("a", "one") + entry("a", "two"), "the name 'a'"),
        (entry("a", "one") + entry("b", "one"), "the keys 'a' and 'b' have the same hash"),
        (
            f'[[keys]]\nname = "a"\nhash = ["{hash_of("one")}", "{hash_of("one")}"]',
            "the key 'a' has the same hash twice",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_the_flag_and_the_reason(path, content, problem):
    path.write_text(content)
    with pytest.raises(InvalidRequest, match="flag api_keys_file=") as caught:
        KeyRing.load(path)
    assert problem in caught.value.message
    assert "the key itself" not in caught.value.message
    assert hash_of("one").removeprefix("sha256:") not in caught.value.message


def test_a_file_that_is_missing_or_that_anybody_may_write_is_refused(path):
    with pytest.raises(InvalidRequest, match="cannot be read"):
        KeyRing.load(path)
    path.write_text(entry("a", "one"))
    path.chmod(0o666)
    with pytest.raises(InvalidRequest, match="every user of this host can write"):
        KeyRing.load(path)


def test_a_salt_belongs_to_one_key():
    assert len({salted("a", ""), salted("a", "x"), salted("b", "x"), salted("a1", ""), salted("a", "1")}) == 5
    assert salted("a", salted("b", "")) != salted("b", "")


def test_the_command_prints_an_entry_for_the_file_and_the_key_beside_it(path):
    made = subprocess.run(
        [sys.executable, "-m", "services.gateway.http.new_key", "name=team-a", "scopes=inference,admin",
         "tokens_per_minute=500", "expires=2999-01-01"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    path.write_text(made.stdout)
    [key] = [word for word in made.stderr.split() if word.startswith("tk-")]
    assert key not in made.stdout
    found = KeyRing.load(path).find(key)
    assert (found.name, found.scopes, found.tokens_per_minute) == ("team-a", {"inference", "admin"}, 500)
    assert isinstance(found, Key)


@pytest.mark.parametrize(
    "flags", [[], ["name=a b"], ["name=a", "scopes=root"], ["name=a", "expires=soon"], ["name=a", "max_concurrent=0"]]
)
def test_the_command_refuses_what_the_file_would_not_take(flags):
    made = subprocess.run([sys.executable, "-m", "services.gateway.http.new_key", *flags], capture_output=True)
    assert (made.returncode, made.stdout) == (2, b"")


@pytest.mark.parametrize(
    ("flags", "limits"),
    [
        ([], (256, 5_000_000)),
        (["max_concurrent=none", "tokens_per_minute=none"], (None, None)),
        (["max_concurrent=3"], (3, 5_000_000)),
    ],
)
def test_a_new_key_has_limits_unless_none_are_asked_for(path, flags, limits):
    path.write_text(entry_of(load(NewKeyConfig, ["name=a", *flags], {}), "tk-x"))
    [key] = KeyRing.load(path).keys
    assert (key.max_concurrent, key.tokens_per_minute) == limits


def test_keys_are_long_and_differ():
    assert len({new_key() for _ in range(100)}) == 100
    assert len(new_key()) > 40
