"""Word problems about everyday things: seats, recipes, growth, water, legs, votes."""

from training.problems import MULTIPLES, Story


def buses(s: Story) -> None:
    """Vehicles with seats, of which some are empty."""
    vehicle = s.pick("buses", "vans", "boats", "train cars", "wagons")
    count, rows, seats = s.number(2, 12), s.number(3, 15), s.number(2, 6)
    s.say(
        f"A school rents {count} {vehicle}. Each has {rows} rows with {seats} seats in each row.",
        f"There are {count} {vehicle} with {rows} rows of seats each, and every row has {seats} seats.",
    )
    each = s.step(
        f"{rows}*{seats}", f"Each of the {vehicle} has @ seats.", f"There are @ seats in each of the {vehicle}."
    )
    total = s.step(f"{count}*{each}", "In all there are @ seats.", f"The {vehicle} have @ seats together.")
    empty = s.number(2, int(total) // 2)
    if s.rng.random() < 0.5:
        s.say(
            f"{empty} seats stay empty. How many people are on the {vehicle}?",
            f"If {empty} seats are empty, how many people ride?",
        )
        s.step(f"{total}-{empty}", f"So @ people are on the {vehicle}.")
    else:
        s.say(
            f"{empty} people want to go. How many seats stay free?",
            f"How many seats are empty when {empty} people sit down?",
        )
        s.step(f"{total}-{empty}", "So @ seats are empty.")


def growth(s: Story) -> None:
    """Something grows by different amounts in two periods."""
    p, unit = s.person(), s.pick("inches", "centimeters")
    what = s.pick("sunflower", "tomato plant", "tree", "puppy", "beanstalk", "bamboo")
    start, first, second, a, b = s.size(3), s.number(2, 9), s.number(2, 9), s.number(2, 8), s.number(2, 8)
    period = s.pick("week", "month", "year")
    s.say(f"{p}'s {what} was {start} {unit} tall.", f"When {p} got a {what}, it was {start} {unit} tall.")
    s.say(
        f"It grew {first} {unit} every {period} for the first {a} {period}s "
        f"and then {second} {unit} every {period} for {b} more {period}s.",
        f"For {a} {period}s it grows {first} {unit} per {period}, and "
        f"for the next {b} {period}s {second} {unit} per {period}.",
    )
    s.say(f"How tall is the {what} now?", f"How many {unit} tall is it after that?")
    x = s.step(f"{a}*{first}", f"In the first {a} {period}s it grew @ {unit}.")
    y = s.step(f"{b}*{second}", f"In the next {b} {period}s it grew @ {unit}.")
    s.step(f"{start}+{x}+{y}", f"Now it is @ {unit} tall.", f"So the {what} is @ {unit} tall.")


def routine(s: Story) -> None:
    """Minutes of several activities a day, summed over a week."""
    p = s.person()
    acts = s.rng.sample(
        ["practicing piano", "doing homework", "walking the dog", "jogging", "cooking", "drawing", "stretching"], 3
    )
    times, days = [s.number(10, 90, 5) for _ in acts], s.number(3, 7)
    s.say(
        f"Every day, {p} spends {times[0]} minutes {acts[0]}, {times[1]} "
        f"minutes {acts[1]} and {times[2]} minutes {acts[2]}.",
        f"{p} spends {times[0]} minutes {acts[0]} each day. {p.they.capitalize()} "
        f"also spends {times[1]} minutes {acts[1]} and {times[2]} minutes {acts[2]}.",
    )
    day = s.step("+".join(map(str, times)), f"{p} spends @ minutes a day.", "Each day that is @ minutes.")
    s.say(
        f"How many minutes does {p} spend on these in {days} days?",
        f"How much time, in minutes, is that in {days} days?",
    )
    week = s.step(f"{day}*{days}", f"In {days} days that is @ minutes.")
    if week % 60 == 0:
        s.say("Give the time in hours.")
        s.step(f"{week}/60", "That is @ hours.")


def recipe(s: Story) -> None:
    """A recipe for more servings than it is written for."""
    p, servings, times = s.person(), s.number(2, 8), s.number(2, 6)
    food = s.pick("soup", "pancakes", "lemonade", "stew", "salad", "pasta", "punch")
    a, b = s.rng.sample(
        ["cups of flour", "cups of milk", "eggs", "spoons of sugar", "cups of water", "onions", "lemons", "carrots"], 2
    )
    x, y = s.number(2, 9), s.number(2, 9)
    s.say(
        f"A recipe for {servings} servings of {food} needs {x} {a} and {y} {b}.",
        f"To make {food} for {servings} people, {p} uses {x} {a} and {y} {b}.",
    )
    s.say(f"{p} wants to make {servings * times} servings.", f"{p} cooks for {servings * times} people.")
    scale = s.step(f"{servings * times}/{servings}", f"{p} makes the recipe @ times.", "That is @ times the recipe.")
    if s.rng.random() < 0.5:
        s.say(f"How many {a} does {p.they} need?")
        s.step(f"{x}*{scale}", f"{p} needs @ {a}.")
        return
    s.say(f"{p.they} already has {y} {b}. How many more {b} does {p.they} need?")
    need = s.step(f"{y}*{scale}", f"{p} needs @ {b}.")
    s.step(f"{need}-{y}", f"{p.they} has to get @ more {b}.")


def dozens(s: Story) -> None:
    """Dozens bought, used in several ways."""
    p, thing, count = s.person(), s.thing(), s.number(2, 12)
    s.say(f"{p} bought {count} dozen {thing}.", f"{p} has {count} dozen {thing}.")
    total = s.step(f"{count}*12", f"{p} has @ {thing}.", f"{count} dozen is @ {thing}.")
    days, each = s.number(2, 5), s.number(1, 4)
    s.say(
        f"{p.they} uses {each} a day for {days} days.",
        f"Each day for {days} days, {p.their} family uses {each} of them.",
    )
    used = s.step(f"{each}*{days}", f"In {days} days @ are used.")
    left = s.step(f"{total}-{used}", f"That leaves @ {thing}.", f"{p} has @ {thing} left.")
    if left % 2 == 0 and s.rng.random() < 0.5:
        s.say("Then half of the rest are given away.", f"{p} gives half of what is left to a neighbor.")
        left = s.step(f"{left}/2", f"{p} gives away half of them and keeps @ {thing}.", f"Half of them is @ {thing}.")
    s.say(f"How many {thing} are left?", f"How many {thing} does {p} have left?")


def legs(s: Story) -> None:
    """Legs or wheels of several kinds of things."""
    kinds = {"legs": [("cows", 4), ("chickens", 2), ("spiders", 8), ("ants", 6), ("dogs", 4), ("ducks", 2)],
             "wheels": [("cars", 4), ("bicycles", 2), ("tricycles", 3), ("trucks", 6)],
             "points": [("stars", 5), ("triangles", 3), ("squares", 4), ("hexagons", 6)]}  # fmt: skip
    part = s.pick(*kinds)
    (a, x), (b, y) = s.rng.sample(kinds[part], 2)
    n, m = s.number(2, 30), s.number(2, 30)
    s.say(f"There are {n} {a} and {m} {b}.", f"{s.person()} counts {n} {a} and {m} {b}.")
    s.say(f"How many {part} do they have in total?", f"How many {part} are there altogether?")
    first = s.step(f"{n}*{x}", f"The {a} have @ {part}.")
    second = s.step(f"{m}*{y}", f"The {b} have @ {part}.")
    s.step(f"{first}+{second}", f"In total there are @ {part}.")


def fraction_chain(s: Story) -> None:
    """Parts of what is left, one after another."""
    p, thing = s.person(), s.thing()
    x, y = s.number(2, 5), s.number(2, 5)
    total = x * y * s.number(2, 20)
    s.say(f"{p} made {total} {thing}.", f"{p} has {total} {thing}.")
    s.say(
        f"{p.they} gave 1/{x} of them to {p.their} neighbor and 1/{y} of the rest to {s.person()}.",
        f"1/{x} of the {thing} are red, and 1/{y} of the others are blue; {p} removes all of these.",
    )
    s.say(f"How many {thing} does {p} still have?", f"How many {thing} remain?")
    first = s.step(f"{total}/{x}", f"The first part is @ {thing}.", f"1/{x} of them is @ {thing}.")
    rest = s.step(f"{total}-{first}", f"That leaves @ {thing}.")
    second = s.step(f"{rest}/{y}", f"The second part is @ {thing}.", f"1/{y} of the rest is @ {thing}.")
    s.step(f"{rest}-{second}", f"{p} still has @ {thing}.", f"So @ {thing} remain.")


def more_than_times(s: Story) -> None:
    """A number that is some more, or fewer, than a multiple of another."""
    a, b, thing = s.person(), s.person(), s.thing()
    base, times, gap = s.size(4), s.number(2, 5), s.number(2, 12)
    word, sign = s.rng.choice([("more", "+"), ("less", "-")])
    s.say(f"{a} has {base} {thing}.", f"{a} picked {base} {thing}.")
    s.say(
        f"{b} has {gap} {word} than {MULTIPLES[times]} as many {thing} as {a}.",
        f"{b}'s number of {thing} is {gap} {word} than {MULTIPLES[times]} that of {a}.",
    )
    product = s.step(f"{base}*{times}", f"{MULTIPLES[times]} as many as {a} has is @.")
    other = s.step(f"{product}{sign}{gap}", f"So {b} has @ {thing}.", f"{b} has @ {thing}.")
    if s.rng.random() < 0.6:
        s.say(f"How many {thing} do {a} and {b} have together?", f"How many {thing} do they have in all?")
        s.step(f"{base}+{other}", f"Together they have @ {thing}.")
    else:
        s.say(f"How many {thing} does {b} have?")


def tank(s: Story) -> None:
    """Water that flows in and out."""
    p, what = s.person(), s.pick("tank", "pool", "tub", "barrel")
    fast, time, start = s.number(6, 40), s.number(3, 30), s.number(10, 200, 5)
    slow = s.number(1, fast - 2)
    unit = s.pick("gallons", "liters")
    s.say(f"A {what} holds {start} {unit} of water.", f"There are {start} {unit} of water in {p}'s {what}.")
    s.say(
        f"{p} fills in {fast} {unit} a minute, but {slow} {unit} a minute leak out.",
        f"A hose adds {fast} {unit} every minute while {slow} {unit} drain away every minute.",
    )
    s.say(f"How many {unit} are in the {what} after {time} minutes?", f"How much water is in it {time} minutes later?")
    net = s.step(f"{fast}-{slow}", f"Each minute the {what} gains @ {unit}.")
    gain = s.step(f"{net}*{time}", f"In {time} minutes it gains @ {unit}.")
    s.step(f"{start}+{gain}", f"So there are @ {unit}.", f"The {what} then has @ {unit}.")


def sum_difference(s: Story) -> None:
    """Two numbers from their sum and difference."""
    a, b = s.rng.choice(
        [
            ("girls", "boys"),
            ("cats", "dogs"),
            ("adults", "children"),
            ("red cars", "blue cars"),
            ("teachers", "parents"),
        ]
    )
    place, gap, small = s.pick("club", "park", "building", "camp", "street", "town"), s.number(2, 30), s.number(3, 60)
    total = 2 * small + gap
    s.say(f"There are {total} {a} and {b} in a {place}.", f"A {place} has {total} {a} and {b} in all.")
    s.say(f"There are {gap} more {a} than {b}.", f"The {a} are {gap} more than the {b}.")
    rest = s.step(f"{total}-{gap}", f"Without the extra {a} there would be @.")
    half = s.step(f"{rest}/2", f"So there are @ {b}.")
    if s.rng.random() < 0.5:
        s.say(f"How many {b} are there?", f"What is the number of {b}?")
    else:
        s.say(f"How many {a} are there?", f"What is the number of {a}?")
        s.step(f"{half}+{gap}", f"There are @ {a}.")


def together(s: Story) -> None:
    """Two people work at different rates."""
    a, b, thing = s.person(), s.person(), s.thing()
    x, y, hours = s.number(2, 25), s.number(2, 25), s.number(2, 12)
    s.say(
        f"{a} can make {x} {thing} an hour and {b} can make {y} {thing} an hour.",
        f"In an hour, {a} packs {x} {thing} and {b} packs {y}.",
    )
    both = s.step(f"{x}+{y}", f"Together they do @ {thing} an hour.", f"In an hour, that is @ {thing}.")
    if s.rng.random() < 0.5:
        s.say(
            f"How many hours do they need for {(x + y) * hours} {thing}?",
            f"How long do {(x + y) * hours} {thing} take them together?",
        )
        s.step(f"{(x + y) * hours}/{both}", "They need @ hours.", "It takes @ hours.")
    else:
        s.say(f"They work for {hours} hours and {x} of the {thing} are bad. How many good ones are there?")
        made = s.step(f"{both}*{hours}", f"In {hours} hours they make @ {thing}.")
        s.step(f"{made}-{x}", "So @ are good.")


def votes(s: Story) -> None:
    """Change of a number by a percentage, then by another."""
    what, place = (
        s.pick("students", "members", "visitors", "readers", "players"),
        s.pick("school", "club", "museum", "library", "league"),
    )
    base, rise, fall = s.number(1, 20) * 100, s.rng.choice([10, 20, 25, 30, 40, 50]), s.rng.choice([10, 20, 25, 50])
    s.say(f"Last year a {place} had {base} {what}.", f"The number of {what} of a {place} was {base}.")
    s.say(f"This year the number grew by {rise}%.", f"It went up by {rise} percent this year.")
    more = s.step(f"{base}*{rise}/100", f"The increase is @ {what}.", f"{rise}% of {base} is @.")
    now = s.step(f"{base}+{more}", f"Now there are @ {what}.", f"This year there are @ {what}.")
    if now * fall % 100 == 0 and s.rng.random() < 0.5:
        s.say(f"Next year {fall}% of them will leave.")
        s.say(f"How many {what} will be left?")
        gone = s.step(f"{now}*{fall}/100", f"@ {what} will leave.")
        s.step(f"{now}-{gone}", f"So @ {what} will be left.")
    else:
        s.say(f"How many {what} are there now?", f"How many {what} does the {place} have this year?")


DAILY_SCENARIOS = [
    buses, growth, routine, recipe, dozens, legs, fraction_chain, more_than_times, tank,
    sum_difference, together, votes,
]  # fmt: skip
