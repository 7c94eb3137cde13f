"""The number of examples that hypothesis tries of each property: few in ``make test``, many in ``make test-all``."""

from hypothesis import HealthCheck, Phase, settings

_THOROUGH = "thorough"
_SHARE = 4  # `make test` tries one of this number of examples


def register_profiles() -> None:
    """Register the profiles and load the quick one. ``--hypothesis-profile=thorough`` selects another."""
    # No deadlines: a busy machine is slow, which says nothing about a test.
    untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("quick", untimed, max_examples=100 // _SHARE)
    settings.register_profile(_THOROUGH, untimed, max_examples=100)
    # For `make mutants`, which asks only whether a test fails: a smaller counterexample takes minutes to find.
    phases = (Phase.explicit, Phase.reuse, Phase.generate)
    settings.register_profile("unshrunk", untimed, max_examples=100 // _SHARE, phases=phases)
    settings.load_profile("quick")


def examples(thorough: int, share: int = _SHARE) -> int:
    """Return the number of examples of a property that gets ``thorough`` examples in ``make test-all``.

    ``make test`` tries one of ``share`` examples. A larger ``share`` than usual is for an example that takes long.
    """
    return thorough if settings.get_current_profile_name() == _THOROUGH else max(1, thorough // share)
