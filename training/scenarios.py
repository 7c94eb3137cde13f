"""Random word problems of every kind that training generates."""

import random

from training.problems import Problem, Story
from training.scenarios_counts import COUNT_SCENARIOS, relations, running_total
from training.scenarios_daily import DAILY_SCENARIOS
from training.scenarios_money import MONEY_SCENARIOS
from training.scenarios_prices import PRICE_SCENARIOS

# The two kinds that take the most shapes come more often.
SCENARIOS = [
    *COUNT_SCENARIOS,
    *DAILY_SCENARIOS,
    *MONEY_SCENARIOS,
    *PRICE_SCENARIOS,
    *[relations, running_total] * 3,
]


def generate_problem(rng: random.Random) -> Problem:
    """A random problem of a random kind, two to eight calculations long."""
    while True:
        story = Story(rng)
        try:
            rng.choice(SCENARIOS)(story)
        except ValueError:  # A quantity came out negative, or not exact to two decimals.
            continue
        if 2 <= len(story.lines) <= 8:
            return story.problem()
