"""Word problems about prices, pay and saving."""

from training.problems import MULTIPLES, Story, dollars, format_number, phrases

JOBS = phrases("barista|tutor|cashier|gardener|painter|mechanic|babysitter|dog walker|waiter|plumber")
GOALS = phrases("bike|laptop|guitar|phone|camera|skateboard|tent|game console|telescope|drum kit")
PLACES = phrases("the museum|the beach|the city|work|the lake|the airport|the farm|the stadium")
ANIMALS = [("cows", "liters of milk"), ("chickens", "eggs"), ("goats", "liters of milk"),
           ("ducks", "eggs"), ("sheep", "pounds of wool"), ("hives", "jars of honey")]  # fmt: skip
EARNERS = phrases("bakery|bookstore|coffee shop|farm stand|toy store|flower shop|food truck|gift shop")


def shopping(s: Story) -> None:
    """Several lines on a bill, then perhaps a discount, a delivery or change."""
    p = s.person()
    lines = [(s.number(2, 12), s.thing(), s.price(1, 20)) for _ in range(s.number(2, 3))]
    listed = [f"{count} {thing} for {dollars(cost)} each" for count, thing, cost in lines]
    s.say(
        f"{p} buys {', '.join(listed[:-1])} and {listed[-1]}.",
        f"At the store, {p} bought {', '.join(listed[:-1])}, and {listed[-1]}.",
        f"{p} went shopping. {p.they.capitalize()} got {' and '.join(listed)}.",
    )
    parts = [
        s.step(f"{count}*{cost}", f"The {thing} cost $@.", f"{p} spends $@ on {thing}.") for count, thing, cost in lines
    ]
    total = s.step(
        "+".join(format_number(part) for part in parts),
        "The total is $@.",
        f"In all, {p} spends $@.",
        "So the bill is $@.",
    )
    ending = s.pick("total", "bill", "coupon", "percent", "bill")
    if ending == "percent" and (ways := [rate for rate in (10, 20, 25, 50) if total * rate % 100 == 0]):
        rate = s.rng.choice(ways)
        s.say(f"{p} gets a {rate}% discount on everything.", f"The store takes {rate}% off the bill.")
        off = s.step(f"{format_number(total)}*{rate}/100", "The discount is $@.", f"{p} saves $@.")
        s.say(f"How much does {p} pay?", "What is the final price?")
        s.step(f"{format_number(total)}-{format_number(off)}", f"{p} pays $@.", "So the final price is $@.")
    elif ending == "coupon" and total > 8:
        off = s.number(2, int(total) // 2)
        s.say(f"{p.they} uses a coupon worth ${off}.", f"{p} has a ${off} gift card.")
        s.say(f"How much does {p} have to pay?", f"How much money does {p.they} still have to pay?")
        s.step(f"{format_number(total)}-{off}", f"{p} has to pay $@.", "That leaves $@ to pay.")
    elif ending == "bill":
        paid = int(total) + s.number(1, 60)
        s.say(f"{p.they} pays with ${paid}.", f"{p} had ${paid} at first.", f"{p.they} gives the cashier ${paid}.")
        s.say(f"How much money does {p} have left?", f"How much change does {p.they} get?")
        s.step(f"{paid}-{format_number(total)}", f"{p} gets $@ back.", f"{p.they} has $@ left.")
    else:
        s.say(f"How much did {p} spend in total?", "How much is the bill, in dollars?")


def wages(s: Story) -> None:
    """Hours, days and weeks at a rate, with overtime, costs or a second job."""
    p, rate, hours, days = s.person(), s.number(8, 40), s.number(2, 9), s.number(2, 6)
    s.say(
        f"{p} works as a {s.rng.choice(JOBS)} and earns ${rate} an hour.",
        f"{p} makes ${rate} per hour.",
        f"{p} is a {s.rng.choice(JOBS)} who charges ${rate} per hour.",
    )
    s.say(
        f"{p.they} works {hours} hours a day, {days} days a week.",
        f"Each week {p.they} works {days} days, {hours} hours each day.",
    )
    week = s.step(f"{hours}*{days}", f"{p} works @ hours a week.", "That is @ hours a week.")
    pay = s.step(f"{week}*{rate}", f"{p.they} earns $@ a week.", "So a week's pay is $@.")
    ending = s.pick("weeks", "rent", "bonus", "second", "week")
    if ending == "weeks":
        weeks = s.number(2, 12)
        s.say(f"How much does {p.they} earn in {weeks} weeks?", f"How much money will {p} make in {weeks} weeks?")
        s.step(f"{pay}*{weeks}", f"In {weeks} weeks {p.they} earns $@.")
    elif ending == "rent":
        spent = s.number(10, int(pay) - 5, 5)
        s.say(f"{p.they} spends ${spent} a week on food and rent.", f"Every week, {p.they} pays ${spent} in bills.")
        weeks = s.number(2, 10)
        kept = s.step(f"{pay}-{spent}", f"{p} keeps $@ each week.", f"Each week {p.they} saves $@.")
        s.say(
            f"How much does {p} save in {weeks} weeks?", f"How much money does {p.they} have left after {weeks} weeks?"
        )
        s.step(f"{kept}*{weeks}", f"After {weeks} weeks, {p.they} has $@.")
    elif ending == "bonus":
        extra, overtime = s.number(2, 10), rate + s.number(2, 15)
        s.say(f"For each extra hour, {p.they} is paid ${overtime}. This week {p.they} worked {extra} extra hours.")
        more = s.step(f"{extra}*{overtime}", "The extra hours pay $@.")
        s.say(f"How much did {p} earn this week?")
        s.step(f"{pay}+{more}", f"In total {p} earned $@.", f"This week {p.they} earned $@.")
    elif ending == "second":
        other, jobs = s.number(20, 90, 5), s.number(2, 6)
        s.say(
            f"{p.they} also mows {jobs} lawns a week for ${other} each.",
            f"On weekends {p.they} repairs {jobs} bikes at ${other} each.",
        )
        more = s.step(f"{jobs}*{other}", "The other work brings $@.")
        s.say(f"How much money does {p} make in a week?")
        s.step(f"{pay}+{more}", "Together that is $@ a week.")
    else:
        s.say(f"How much does {p} earn in a week?")


def saving(s: Story) -> None:
    """How long until a goal is reached."""
    p, goal, weekly, costs = s.person(), s.rng.choice(GOALS), s.number(12, 80), s.number(2, 10)
    weeks, start = s.number(3, 20), s.number(5, 90, 5)
    kept = weekly - costs
    s.say(
        f"{p} wants to buy a {goal} that costs ${kept * weeks + start}.",
        f"A {goal} costs ${kept * weeks + start}, and {p} wants one.",
    )
    s.say(f"{p.they} already has ${start}.", f"So far {p} has saved ${start}.")
    s.say(
        f"Each week {p.they} gets ${weekly} and spends ${costs} of it.",
        f"{p.they} earns ${weekly} a week from chores but uses ${costs} a week for snacks.",
    )
    s.say(f"How many weeks does {p} need to save?", f"In how many weeks can {p} buy the {goal}?")
    need = s.step(f"{kept * weeks + start}-{start}", f"{p} still needs $@.")
    save = s.step(f"{weekly}-{costs}", f"{p.they} saves $@ a week.", f"Each week {p.they} keeps $@.")
    s.step(f"{need}/{save}", f"{p} needs @ weeks.", "So it takes @ weeks.")


def travel(s: Story) -> None:
    """Legs of a journey: distance, time, fuel and its cost."""
    p, place = s.person(), s.rng.choice(PLACES)
    if s.rng.random() < 0.5:
        speeds, times = [s.number(10, 70, 5) for _ in "ab"], [s.number(2, 6) for _ in "ab"]
        s.say(
            f"{p} drives to {place} for {times[0]} hours at {speeds[0]} miles per "
            f"hour and then for {times[1]} hours at {speeds[1]} miles per hour.",
            f"On the way to {place}, {p} travels {times[0]} hours at {speeds[0]} "
            f"mph. Then {p.they} travels {times[1]} hours at {speeds[1]} mph.",
        )
        legs = [s.step(f"{speed}*{time}", f"{p} covers @ miles in the {which} part.")
                for speed, time, which in zip(speeds, times, ("first", "second"), strict=True)]  # fmt: skip
        whole = s.step(f"{legs[0]}+{legs[1]}", "The whole way is @ miles.", f"So {p.they} travels @ miles.")
        if s.rng.random() < 0.5:
            s.say(f"How far does {p} travel in total?", f"How many miles is the way to {place}?")
            return
        s.say(f"{p.they} comes back the same way. How many miles is the round trip?")
        s.step(f"{whole}*2", "There and back is @ miles.")
        return
    economy, gallons, cost = s.number(15, 40, 5), s.number(2, 12), s.number(2, 5)
    s.say(f"{place} is {economy * gallons} miles from {p}'s home.", f"{p} drives {economy * gallons} miles to {place}.")
    s.say(
        f"{p.their} car goes {economy} miles on a gallon of gas, and gas costs ${cost} a gallon.",
        f"The car needs a gallon of gas for every {economy} miles. A gallon costs ${cost}.",
    )
    s.say("How much does the gas for the round trip cost?", f"How much will {p} spend on gas to go there and back?")
    both = s.step(f"{economy * gallons}*2", "The round trip is @ miles.", f"{p} drives @ miles in all.")
    used = s.step(f"{both}/{economy}", f"{p} needs @ gallons.", "The car uses @ gallons.")
    s.step(f"{used}*{cost}", "The gas costs $@.", f"{p} spends $@ on gas.")


def farm(s: Story) -> None:
    """Animals that give something every day, sold at a price."""
    p, (animal, product) = s.person(), s.rng.choice(ANIMALS)
    count, each, days, cost = s.number(2, 30), s.number(2, 9), s.number(2, 14), s.price(1, 6)
    s.say(f"{p} has {count} {animal}.", f"On {p}'s farm there are {count} {animal}.")
    s.say(f"Each of them gives {each} {product} a day.", f"Every day {p.they} gets {each} {product} from each.")
    daily = s.step(f"{count}*{each}", f"The {animal} give @ {product} a day.", f"{p} gets @ {product} a day.")
    if daily > 4 and s.rng.random() < 0.6:
        used = s.number(2, int(daily) // 2)
        s.say(f"{p.their} family uses {used} of these each day.", f"{p} keeps {used} each day for {p.their} family.")
        daily = s.step(f"{daily}-{used}", f"{p} can sell @ a day.", "@ are left to sell each day.")
    s.say(f"{p.they} sells the rest for {dollars(cost)} each.", f"They sell for {dollars(cost)} each.")
    income = s.step(f"{daily}*{cost}", f"{p} makes $@ a day.", "Each day brings $@.")
    if s.rng.random() < 0.6:
        s.say(f"How much does {p} make in {days} days?", f"How many dollars is that in {days} days?")
        s.step(f"{format_number(income)}*{days}", f"In {days} days {p} makes $@.")
    else:
        s.say(f"How much money does {p} make every day?")


def profit(s: Story) -> None:
    """Bought or made at one price and sold at another."""
    p, thing, count, low = s.person(), s.thing(), s.number(5, 60), s.number(2, 15)
    high, fixed = low + s.number(1, 12), s.number(2, 5)
    s.say(
        f"{p} makes {thing} for ${low} each and sells them for ${high} each.",
        f"{p} buys {thing} at ${low} apiece and sells each for ${high}.",
    )
    if s.rng.random() < 0.5:
        gain = s.step(f"{high}-{low}", f"{p} makes $@ on each.", "The profit on each one is $@.")
        s.say(
            f"How much profit does {p.they} make on {count} {thing}?",
            f"If {p.they} sells {count}, what is {p.their} profit?",
        )
        total = s.step(f"{gain}*{count}", f"On {count} {thing} the profit is $@.", f"{p} makes $@.")
        return
    spent = s.step(f"{count}*{low}", f"{p} spends $@ on the {thing}.")
    taken = s.step(f"{count}*{high}", f"{p} takes in $@.")
    total = s.step(f"{taken}-{spent}", "The difference is $@.")
    s.say(
        f"{p.they} sells {count} of them and pays a fee of ${fixed}.",
        f"A stall costs {p.them} ${fixed}, and {p.they} sells {count}.",
    )
    s.say(f"How much does {p} gain?", f"What is {p.their} profit?")
    s.step(f"{total}-{fixed}", f"After the fee, {p} has a profit of $@.")


def business(s: Story) -> None:
    """A shop's income on days of different sales, less its costs."""
    shop, thing, cost = s.rng.choice(EARNERS), s.thing(), s.number(2, 15)
    first, times, days = s.size(5), s.number(2, 4), s.number(2, 5)
    day, weekend = s.pick("each weekday", "on every weekday"), s.pick("on Saturday", "on Sunday")
    s.say(f"A {shop} sells {first} {thing} {day} and {MULTIPLES[times]} as many {weekend}.")
    s.say(f"Each one costs ${cost}.", f"The price is ${cost} each.")
    week = s.step(f"{first}*5", f"In five weekdays the {shop} sells @ {thing}.")
    special = s.step(f"{first}*{times}", f"{weekend} it sells @ {thing}.")
    total = s.step(f"{week}+{special}", f"That is @ {thing} a week.")
    s.say(f"How much does the {shop} take in during {days} weeks?", f"How many dollars come in over {days} weeks?")
    money = s.step(f"{total}*{cost}", f"In a week the {shop} takes in $@.")
    s.step(f"{money}*{days}", f"In {days} weeks that is $@.")


MONEY_SCENARIOS = [
    shopping,
    wages,
    saving,
    travel,
    farm,
    profit,
    business,
]
