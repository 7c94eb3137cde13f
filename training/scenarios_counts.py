"""Word problems about things, people, time and shapes."""

from itertools import pairwise

from training.problems import MULTIPLES, PARTS, Story, dollars, phrases, words

CALENDAR = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
GROUPS = phrases(
    "students in a school|people at a concert|guests at a wedding|workers in a factory|cars in a parking lot|"
    "animals on a farm|members of a club|fish in a pond|trees in an orchard|passengers on a ship"
)
BOXES = phrases("boxes|bags|crates|baskets|packs|shelves|jars|cartons|drawers")


def relations(s: Story) -> None:
    """Each of several people (or days) has a number given in terms of an earlier one's."""
    thing, verb = s.thing(), s.pick("has", "bought", "collected", "sold", "made", "picked", "found")
    base = {"has": "have", "bought": "buy", "collected": "collect", "sold": "sell", "made": "make",
            "picked": "pick", "found": "find"}[verb]  # fmt: skip
    owners = [str(s.person()) for _ in range(s.number(2, 5))]
    values = {owners[0]: s.size(4)}
    facts, hidden = [f"{owners[0]} {verb} {values[owners[0]]} {thing}."], []
    for previous, owner in pairwise(owners):
        old = values[previous]
        kind = s.pick("more", "fewer", "times", "part", "times", "more")
        if kind == "part" and (ways := [part for part in PARTS if old % part == 0 and old > part]):
            part = s.rng.choice(ways)
            fact, expression = f"{PARTS[part]} as many {thing} as {previous}", f"{old}/{part}"
        elif kind == "times" and old < 300:
            times = s.number(2, 5)
            fact, expression = f"{MULTIPLES[times]} as many {thing} as {previous}", f"{old}*{times}"
        elif kind == "fewer" and old > 4:
            less = s.number(2, old - 2)
            fact, expression = f"{less} fewer {thing} than {previous}", f"{old}-{less}"
        else:
            more = s.size(2)
            fact, expression = f"{more} more {thing} than {previous}", f"{old}+{more}"
        facts.append(f"{owner} {verb} {fact}.")
        values[owner] = int(s.step(expression, f"{owner} {verb} @ {thing}."))
        hidden.append(owner)
    if s.rng.random() < 0.3:
        facts.reverse()
    for fact in facts:
        s.say(fact)
    first, last = owners[0], owners[-1]
    choice = s.pick("total", "total", "last", "difference")
    if choice == "total" or (choice == "difference" and values[first] == values[last]):
        names = ", ".join(owners[:-1]) + " and " + last
        s.say(
            f"How many {thing} do they have in total?"
            if verb == "has"
            else f"How many {thing} did they {base} altogether?",
            f"What is the total number of {thing} that {names} {'have' if verb == 'has' else verb}?",
        )
        s.step(
            "+".join(str(value) for value in values.values()),
            f"In total, there are @ {thing}.",
            f"Altogether, that is @ {thing}.",
            f"They {base} @ {thing} in total.",
        )
    elif choice == "difference":
        more, less = (first, last) if values[first] > values[last] else (last, first)
        s.say(f"How many more {thing} {'does' if verb == 'has' else 'did'} {more} {base} than {less}?")
        s.step(f"{values[more]}-{values[less]}", f"{more} {verb} @ more {thing} than {less}.")
    else:
        s.say(f"How many {thing} {'does' if verb == 'has' else 'did'} {last} {base}?")


def running_total(s: Story) -> None:
    """One person's things come and go."""
    p, thing = s.person(), s.thing()
    count = s.size(10)
    s.say(f"{p} has {count} {thing}.", f"{p} had {count} {thing}.", f"{p} starts with {count} {thing}.")
    for _ in range(s.number(2, 5)):
        kind = s.pick("gain", "lose", "part", "double", "friends", "lose")
        if kind == "part" and (ways := [part for part in PARTS if count % part == 0 and count > 2 * part]):
            part = s.rng.choice(ways)
            s.say(
                f"Then {p.they} gives {PARTS[part]} of them to {p.their} "
                f"{s.pick('sister', 'brother', 'friend', 'mother')}.",
                f"{p.they} loses {PARTS[part]} of the {thing}.",
                f"{p.they} sells {PARTS[part]} of {p.their} {thing}.",
            )
            gone = s.step(f"{count}/{part}", f"{p} parts with @ {thing}.", f"That is @ {thing} gone.")
            count = int(s.step(f"{count}-{gone}", f"{p.they} has @ {thing} left.", f"Then there are @ {thing} left."))
        elif kind == "friends" and count > 20:
            friends = s.number(2, 6)
            each = s.number(2, max(2, count // (2 * friends)))
            s.say(
                f"{p.they} gives {each} {thing} to each of {p.their} {friends} friends.",
                f"Each of {p.their} {friends} cousins gets {each} {thing} from {p.them}.",
            )
            gone = s.step(f"{friends}*{each}", f"{p} gives away @ {thing}.")
            count = int(s.step(f"{count}-{gone}", f"{p.they} has @ {thing} left."))
        elif kind == "double" and count < 200:
            s.say(f"The next day, {p.they} doubles the number of {thing} {p.they} has.")
            count = int(s.step(f"{count}*2", f"After doubling, {p.they} has @ {thing}."))
        elif kind == "lose" and count > 6:
            gone = s.number(2, count - 3)
            s.say(
                f"{p.they} gives {gone} {thing} away.",
                f"{p.they} then loses {gone} of them.",
                f"{s.person()} takes {gone} of the {thing}.",
                f"{p.they} sells {gone} {thing}.",
            )
            count = int(
                s.step(f"{count}-{gone}", f"Now {p.they} has @ {thing}.", f"That leaves {p.them} with @ {thing}.")
            )
        else:
            more = s.size(2)
            s.say(
                f"{p.they} buys {more} more {thing}.",
                f"{s.person()} gives {p.them} {more} {thing}.",
                f"Then {p.they} finds another {more} {thing}.",
            )
            count = int(s.step(f"{count}+{more}", f"Now {p.they} has @ {thing}.", f"That makes @ {thing}."))
    s.say(
        f"How many {thing} does {p} have now?",
        f"How many {thing} does {p.they} have left?",
        f"How many {thing} does {p} have in the end?",
    )


def shares(s: Story) -> None:
    """Percentages and fractions of a group."""
    group = s.rng.choice(GROUPS)
    rate, part = s.rng.choice([10, 20, 25, 30, 40, 50, 60, 75]), s.rng.choice([2, 3, 4, 5])
    total = s.number(1, 12) * 20 * part
    noun, (first, second) = (
        group.split()[0],
        s.rng.sample(["new", "small", "young", "tall", "quiet", "late", "local"], 2),
    )
    s.say(f"There are {total} {group}.", f"Of the {total} {group}, some are counted.")
    s.say(f"{rate}% of them are {first}.", f"{rate} percent of the {noun} are {first}.")
    a = s.step(f"{total}*{rate}/100", f"There are @ {first} {noun}.", f"The number of {first} {noun} is @.")
    rest = s.step(f"{total}-{a}", f"The other {noun} are @.", f"That leaves @ {noun}.")
    if rest % part:
        s.say(f"How many of the {noun} are not {first}?")
        return
    s.say(f"Of the rest, {PARTS[part]} are {second}.", f"{PARTS[part]} of the others are {second}.")
    b = s.step(f"{rest}/{part}", f"There are @ {second} {noun}.", f"Of those, @ are {second}.")
    if s.rng.random() < 0.5:
        s.say(f"How many {noun} are neither {first} nor {second}?", f"How many of the {noun} are left?")
        s.step(f"{rest}-{b}", f"So @ {noun} are neither.", f"That leaves @ {noun}.")
    else:
        s.say(f"How many {noun} are {first} or {second}?")
        s.step(f"{a}+{b}", f"Together there are @ {noun}.")


def containers(s: Story) -> None:
    """Boxes with things in them: packing, leftovers, price."""
    p, thing, box = s.person(), s.thing(), s.rng.choice(BOXES)
    count, each = s.number(3, 25), s.number(4, 30)
    s.say(
        f"{p} has {count} {box} with {each} {thing} in each.",
        f"There are {count} {box}. Each one holds {each} {thing}.",
        f"{p} orders {count} {box} of {thing}, {each} in each.",
    )
    total = s.step(f"{count}*{each}", f"There are @ {thing}.", f"In the {box} there are @ {thing}.")
    if s.rng.random() < 0.6:
        bad = s.number(2, max(2, int(total) // 3))
        s.say(f"{bad} of the {thing} are broken.", f"{p} keeps {bad} of them.", f"{bad} {thing} get lost.")
        total = s.step(f"{total}-{bad}", f"@ {thing} are left.", f"That leaves @ {thing}.")
    ending = s.pick("sell", "share", "repack")
    divisors = [people for people in range(2, 13) if total % people == 0]
    if ending == "sell" or not divisors:
        cost = s.price(1, 9)
        s.say(f"{p} sells the rest for {dollars(cost)} each.", f"The {thing} are sold at {dollars(cost)} apiece.")
        s.say(f"How much money does {p} get?", f"How many dollars does {p} make?")
        s.step(f"{total}*{cost}", f"{p} gets $@.", "Selling them brings $@.")
    elif ending == "share":
        people = s.rng.choice(divisors)
        s.say(
            f"{p} shares the {thing} equally among {people} children.", f"{people} friends split the {thing} equally."
        )
        s.say(f"How many {thing} does each get?")
        s.step(f"{total}/{people}", f"Each one gets @ {thing}.")
    else:
        size = s.rng.choice(divisors)
        s.say(f"{p} puts them into sets of {size}.", f"Then {p.they} ties them in bundles of {size}.")
        s.say("How many sets are there?", f"How many groups does {p} make?")
        s.step(f"{total}/{size}", f"{p} makes @ sets.", "There are @ groups.")


def ages(s: Story) -> None:
    """Ages now, earlier and later."""
    a, b, c = s.person(), s.person(), s.person()
    age, times, gap, years = s.number(4, 25), s.number(2, 3), s.number(2, 12), s.number(2, 15)
    s.say(f"{a} is {age} years old.")
    s.say(f"{b} is {MULTIPLES[times]} as old as {a}.", f"{b}'s age is {MULTIPLES[times]} {a}'s age.")
    second = s.step(f"{age}*{times}", f"{b} is @ years old.")
    s.say(f"{c} is {gap} years older than {b}.", f"{b} is {gap} years younger than {c}.")
    third = s.step(f"{second}+{gap}", f"{c} is @ years old.")
    ending = s.pick("sum", "future", "mean")
    if ending == "mean" and (age + second + third) % 3 == 0:
        s.say("What is the average of their ages?", "What is the average age of the three?")
        total = s.step(f"{age}+{second}+{third}", "The ages add up to @.")
        s.step(f"{total}/3", "The average is @.")
    elif ending == "sum":
        s.say("What is the sum of their ages?", "How old are they together?")
        s.step(f"{age}+{second}+{third}", "Together they are @ years old.", "The sum of their ages is @.")
    else:
        s.say(f"How old will {c} be in {years} years?", f"What will {c}'s age be {years} years from now?")
        s.step(f"{third}+{years}", f"In {years} years {c} will be @ years old.")


def land(s: Story) -> None:
    """A rectangle: fence, floor or rows of plants."""
    p, length, width = s.person(), s.number(4, 40), s.number(3, 30)
    unit = s.pick("feet", "meters", "yards")
    field = s.pick("garden", "field", "playground", "room", "lawn")
    if s.rng.random() < 0.5:
        s.say(f"{p}'s {field} is {length} {unit} long and {width} {unit} wide.")
    else:
        times = s.number(2, 4)
        s.say(f"{p}'s {field} is {width} {unit} wide and {MULTIPLES[times]} as long.")
        length = int(s.step(f"{width}*{times}", f"The {field} is @ {unit} long."))
    cost = s.number(2, 20)
    if s.rng.random() < 0.5:
        s.say(
            f"{p.they} puts a fence around it that costs ${cost} for each of the {unit}.",
            f"A fence around it costs ${cost} per {unit[:-1] if unit != 'feet' else 'foot'}.",
        )
        around = s.step(f"2*{length}+2*{width}", f"The way around is @ {unit}.", f"The perimeter is @ {unit}.")
        s.say("How much does the fence cost?")
        s.step(f"{around}*{cost}", "The fence costs $@.")
    else:
        s.say(f"Covering it costs ${cost} per square {unit[:-1] if unit != 'feet' else 'foot'}.")
        area = s.step(f"{length}*{width}", f"The area is @ square {unit}.")
        s.say(f"How much does it cost to cover the whole {field}?")
        s.step(f"{area}*{cost}", "Covering it costs $@.")


def minutes(s: Story) -> None:
    """Work that takes minutes each, in hours."""
    p, thing, each = s.person(), s.thing(), s.rng.choice([5, 10, 12, 15, 20, 30])
    hours, days = s.number(2, 6), s.number(2, 7)
    if s.rng.random() < 0.5:
        s.say(
            f"It takes {p} {each} minutes to make one of the {thing}.",
            f"{p} needs {each} minutes for each of {p.their} {thing}.",
        )
        s.say(
            f"{p.they} works {hours} hours a day for {days} days.",
            f"For {days} days, {p.they} works {hours} hours a day.",
        )
        s.say(f"How many {thing} does {p} make?", f"How many of the {thing} are made?")
        per_hour = s.step(f"60/{each}", f"{p} makes @ {thing} an hour.", f"In an hour, {p.they} finishes @ {thing}.")
        daily = s.step(f"{per_hour}*{hours}", f"{p} makes @ {thing} a day.")
        s.step(f"{daily}*{days}", f"In {days} days {p.they} makes @ {thing}.")
        return
    count = hours * 60 // each
    s.say(
        f"{p} spends {each} minutes on each of {count} {thing}, {days} times a week.",
        f"{days} times a week, {p} cleans {count} {thing}. Each takes {each} minutes.",
    )
    s.say("How many hours is that in a week?", f"How many hours a week does {p} spend?")
    once = s.step(f"{count}*{each}", "Each time takes @ minutes.")
    week = s.step(f"{once}*{days}", "In a week that is @ minutes.")
    s.step(f"{week}/60", "That is @ hours.", f"So {p} spends @ hours a week.")


def reading(s: Story) -> None:
    """Progress through something of known length over days."""
    p = s.person()
    unit, whole, verb = s.rng.choice(
        [
            ("pages", "book", "reads"),
            ("miles", "trail", "walks"),
            ("meters", "fence", "paints"),
            ("lines", "poem", "learns"),
            ("problems", "workbook", "solves"),
        ]
    )
    first, more = s.number(4, 40), s.number(2, 20)
    day, next_day = s.rng.choice(list(pairwise(CALENDAR)))
    second, times = first + more, s.number(2, 3)
    left = s.number(1, 12) * s.number(2, 6)
    total = first + second + first * times + left
    s.say(f"{p} has a {whole} of {total} {unit}.", f"A {whole} has {total} {unit}.")
    s.say(f"On {day} {p} {verb} {first} {unit}, and on {next_day} {p.they} {verb} {more} more {unit} than on {day}.")
    s.say(f"The day after, {p.they} {verb} {MULTIPLES[times]} as many as on {day}.")
    s.say(f"How many {unit} are left?", f"How many {unit} does {p.they} still have to do?")
    s.step(f"{first}+{more}", f"On {next_day} {p} {verb} @ {unit}.")
    s.step(f"{first}*{times}", f"The day after, {p.they} {verb} @ {unit}.")
    done = s.step(
        f"{first}+{second}+{first * times}", f"In three days that is @ {unit}.", f"So far {p.they} has done @ {unit}."
    )
    s.step(f"{total}-{done}", f"There are @ {unit} left.", f"That leaves @ {unit}.")


def backwards(s: Story) -> None:
    """What there was at first, from what is left."""
    p, thing, part = s.person(), s.thing(), s.number(2, 5)
    left, gone = s.number(4, 40), s.number(2, 30)
    s.say(f"{p} gave {gone} {thing} to a friend.", f"{p} ate or lost {gone} of {p.their} {thing}.")
    before = left * part
    s.say(
        f"After that, {p.they} put away equal piles and kept one of {part} piles, which had {left} {thing}.",
        f"Then {p.they} split the rest into {part} equal groups of {left}.",
    )
    s.say(f"How many {thing} did {p} have at first?", f"How many {thing} did {p.they} start with?")
    s.step(f"{left}*{part}", f"Before the split there were @ {thing}.")
    s.step(f"{before}+{gone}", f"At first {p} had @ {thing}.", f"So {p.they} started with @ {thing}.")


def ratio(s: Story) -> None:
    """A total divided in a ratio."""
    a, b, thing = s.person(), s.person(), s.thing()
    x, y = s.rng.sample(range(1, 8), 2)
    unit = s.number(3, 40)
    total = (x + y) * unit
    s.say(
        f"{a} and {b} share {total} {thing} in the ratio {x}:{y}.",
        f"The ratio of {a}'s {thing} to {b}'s is {x}:{y}. Together they have {total} {thing}.",
    )
    parts = s.step(f"{x}+{y}", "There are @ parts.", "The ratio has @ parts in all.")
    each = s.step(f"{total}/{parts}", f"Each part is @ {thing}.")
    if s.rng.random() < 0.5:
        s.say(f"How many {thing} does {b} have?", f"How many {thing} does {b} get?")
        s.step(f"{y}*{each}", f"{b} has @ {thing}.")
    else:
        big, small, gap = (a, b, x - y) if x > y else (b, a, y - x)
        s.say(f"How many more {thing} does {big} have than {small}?")
        parts = s.step(f"{max(x, y)}-{min(x, y)}", f"{big} has @ more parts.")
        s.step(f"{gap}*{each}", f"So {big} has @ more {thing}.")


def scores(s: Story) -> None:
    """An average of several numbers, or the number an average needs."""
    p, count = s.person(), s.number(3, 5)
    mean = s.number(20, 95)
    values = [mean + s.number(-15, 15) for _ in range(count - 1)]
    last = mean * count - sum(values)
    what = s.pick("points in each game", "on each test", "laps each day")
    shown = ", ".join(map(str, values))
    total = "+".join(map(str, values))
    if s.rng.random() < 0.5:
        s.say(f"{p} scored {shown} and {last} {what}.", f"{p}'s results were {shown} and {last}.")
        s.say(f"What is {p}'s average?", "What is the average of these?")
        added = s.step(f"{total}+{last}", "The sum is @.", "Added up, that is @.")
        s.step(f"{added}/{count}", "The average is @.")
    else:
        s.say(f"{p} has scored {shown} so far.", f"So far {p}'s results are {shown}.")
        s.say(f"What must the next result be for an average of {mean} over {count}?")
        need = s.step(f"{mean}*{count}", f"The {count} results must add up to @.")
        have = s.step(total, "So far they add up to @.")
        s.step(f"{need}-{have}", f"{p} needs @.")


COUNT_SCENARIOS = [
    relations, running_total, shares, containers, ages, land, minutes, reading, backwards,
    ratio, scores,
]  # fmt: skip
