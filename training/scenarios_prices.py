"""Word problems about discounts, tips, rents, fees, tickets and budgets."""

from training.problems import Story, format_number


def compare_prices(s: Story) -> None:
    """Two ways of buying the same number of things."""
    p, thing = s.person(), s.thing()
    size, cost, packs = s.number(2, 10), s.number(2, 9), s.number(2, 8)
    bundle = size * cost - s.number(1, size * cost // 2)
    count = size * packs
    s.say(
        f"{thing} cost ${cost} each, or ${bundle} for a pack of {size}.",
        f"A store sells {thing} at ${cost} apiece, and a pack of {size} for ${bundle}.",
    )
    s.say(
        f"{p} needs {count} {thing}. How much does {p.they} save by buying packs?",
        f"How much money does {p} save on {count} {thing} by buying packs?",
    )
    single = s.step(f"{count}*{cost}", f"Bought one by one, {count} {thing} cost $@.")
    needed = s.step(f"{count}/{size}", f"{p} needs @ packs.")
    packed = s.step(f"{needed}*{bundle}", "The packs cost $@.")
    s.step(f"{single}-{packed}", f"So {p} saves $@.")


def sale(s: Story) -> None:
    """An item at a percentage off, several of them, perhaps with a fee."""
    p, item = s.person(), s.pick("shirt", "chair", "lamp", "jacket", "game", "backpack", "pair of shoes", "watch")
    cost, rate, count, fee = (
        s.number(1, 12) * 20,
        s.rng.choice([5, 10, 15, 20, 25, 30, 40, 50]),
        s.number(2, 6),
        s.number(3, 25),
    )
    s.say(
        f"A {item} usually costs ${cost} but is now {rate}% off.",
        f"{p} finds a {item} with a price of ${cost} at a {rate}% discount.",
    )
    off = s.step(f"{cost}*{rate}/100", "The discount is $@.", f"{rate}% of ${cost} is $@.")
    now = s.step(f"{cost}-{format_number(off)}", f"The {item} costs $@ now.", "So the new price is $@.")
    if s.rng.random() < 0.5:
        s.say(f"How much do {count} of them cost?", f"{p} buys {count}. How much does {p.they} pay?")
        s.step(f"{count}*{format_number(now)}", f"All {count} cost $@.")
    else:
        s.say(f"{p} also pays ${fee} for delivery. How much does {p.they} pay in all?")
        s.step(f"{format_number(now)}+{fee}", f"With delivery {p} pays $@.")


def restaurant(s: Story) -> None:
    """A bill with a tip, split among friends."""
    p, friends, rate = s.person(), s.number(2, 6), s.rng.choice([10, 20, 25, 50])
    a, b = s.rng.sample(["pizzas", "burgers", "salads", "sodas", "sandwiches", "desserts", "tacos"], 2)
    x, y, i, j = s.number(2, 8), s.number(2, 8), s.number(2, 20), s.number(2, 15)
    s.say(
        f"{p} and friends order {x} {a} at ${i} each and {y} {b} at ${j} each.",
        f"At a restaurant, {p} orders {x} {a} for ${i} each and {y} {b} for ${j} each.",
    )
    first, second = s.step(f"{x}*{i}", f"The {a} cost $@."), s.step(f"{y}*{j}", f"The {b} cost $@.")
    bill = s.step(f"{first}+{second}", "The bill is $@.", "Together that is $@.")
    s.say(f"They leave a {rate}% tip.", f"{p} adds a tip of {rate}%.")
    tip = s.step(f"{bill}*{rate}/100", "The tip is $@.")
    total = s.step(f"{bill}+{format_number(tip)}", "With the tip it is $@.")
    if total % friends == 0:
        s.say(f"The {friends} of them split the cost equally. How much does each pay?")
        s.step(f"{format_number(total)}/{friends}", "Each pays $@.")
    else:
        s.say("How much do they pay altogether?", "What is the total cost?")


def pay_rise(s: Story) -> None:
    """A wage that rises by a percentage."""
    p, pay, rate = s.person(), s.number(5, 60) * 20, s.rng.choice([5, 10, 15, 20, 25, 50])
    period, many, name = s.rng.choice(
        [("month", 12, "year"), ("week", 4, "month"), ("week", 52, "year"), ("day", 5, "week")]
    )
    s.say(f"{p} earns ${pay} a {period}.", f"{p}'s pay is ${pay} per {period}.")
    s.say(f"{p.they} gets a raise of {rate}%.", f"Then {p.their} pay goes up by {rate}%.")
    more = s.step(f"{pay}*{rate}/100", "The raise is $@.", f"{p}'s pay goes up by $@.")
    now = s.step(f"{pay}+{more}", f"Now {p} earns $@ a {period}.", "So the new pay is $@.")
    s.say(
        f"How much does {p} earn in a {name} now, with {many} {period}s in a {name}?",
        f"How much is that in a {name} of {many} {period}s?",
    )
    s.step(f"{now}*{many}", f"In a {name} that is $@.")


def rental(s: Story) -> None:
    """A fixed price a day and a price a mile, or an hourly price after a first period."""
    p, what = s.person(), s.pick("car", "truck", "van", "boat", "scooter")
    daily, days, each, miles = (
        s.number(10, 90, 5),
        s.number(2, 9),
        s.rng.choice(["0.25", "0.5", "2", "3"]),
        s.number(20, 400, 20),
    )
    s.say(
        f"{p} rents a {what} for {days} days. It costs ${daily} a day plus ${each} a mile.",
        f"Renting a {what} costs ${daily} per day and ${each} per mile. {p} keeps it for {days} days.",
    )
    s.say(
        f"{p.they} goes {miles} miles. How much does {p.they} pay?",
        f"How much does it cost if {p.they} drives {miles} miles?",
    )
    a = s.step(f"{daily}*{days}", "The days cost $@.", f"For {days} days {p} pays $@.")
    b = s.step(f"{miles}*{each}", "The miles cost $@.", f"For the miles {p.they} pays $@.")
    s.step(f"{a}+{b}", "In total that is $@.", f"So {p} pays $@.")


def subscription(s: Story) -> None:
    """Months at one price and months at another."""
    p, what = s.person(), s.pick("gym", "streaming service", "magazine", "phone plan", "music app", "swimming club")
    cost, early, start = 2 * s.number(4, 30), s.number(2, 6), s.number(5, 60, 5)
    s.say(
        f"A {what} costs ${cost} a month, but the first {early} months are half price.",
        f"{p} joins a {what} for ${cost} a month. For the first {early} months {p.they} pays half.",
    )
    s.say(f"There is also a sign-up fee of ${start}.", f"Signing up costs ${start}.")
    s.say(f"How much does {p} pay in the first year?", f"What does the first year cost {p}?")
    half = s.step(f"{cost}/2", "Half the price is $@.")
    a = s.step(f"{half}*{early}", f"The first {early} months cost $@.")
    rest = s.step(f"12-{early}", "The other months are @.")
    b = s.step(f"{rest}*{cost}", "These months cost $@.")
    s.step(f"{a}+{b}+{start}", f"In the first year {p} pays $@.")


def cash(s: Story) -> None:
    """Notes and coins, then something bought."""
    p = s.person()
    a, b = s.rng.sample([1, 5, 10, 20, 50], 2)
    x, y = s.number(2, 9), s.number(2, 9)
    s.say(
        f"{p} has {x} ${a} bills and {y} ${b} bills.", f"In {p}'s wallet there are {x} ${a} bills and {y} ${b} bills."
    )
    first, second = (
        s.step(f"{x}*{a}", f"The ${a} bills are worth $@."),
        s.step(f"{y}*{b}", f"The ${b} bills are worth $@."),
    )
    total = s.step(f"{first}+{second}", f"{p} has $@.", "Altogether that is $@.")
    spent, thing = s.number(2, int(total) - 2), s.thing()
    s.say(
        f"{p.they} spends ${spent} on {thing}. How much is left?",
        f"How much money does {p.they} have left after paying ${spent} for {thing}?",
    )
    s.step(f"{total}-{spent}", f"{p} has $@ left.", "That leaves $@.")


def commission(s: Story) -> None:
    """A base pay and a percentage of sales."""
    p, base, rate, sold = (
        s.person(),
        s.number(100, 900, 50),
        s.rng.choice([5, 10, 15, 20, 25, 30]),
        s.number(2, 60) * 20,
    )
    s.say(
        f"{p} earns ${base} a week plus a {rate}% commission on sales.",
        f"{p}'s weekly pay is ${base}, and {p.they} gets {rate}% of what {p.they} sells.",
    )
    s.say(f"This week {p.they} sells goods for ${sold}.", f"{p.their} sales this week are ${sold}.")
    s.say(f"How much does {p} earn this week?", f"What is {p}'s pay for the week?")
    extra = s.step(f"{sold}*{rate}/100", "The commission is $@.")
    s.step(f"{base}+{extra}", f"In all {p} earns $@.")


def fundraiser(s: Story) -> None:
    """Groups that raise different sums towards a goal."""
    x, y, i, j = s.number(3, 30), s.number(3, 30), s.number(2, 25), s.number(2, 25)
    cause, more = s.pick("a school trip", "new uniforms", "a library", "a charity"), s.number(5, 300, 5)
    a, b = s.rng.sample(["students", "parents", "teachers", "neighbors", "players", "scouts"], 2)
    s.say(
        f"A class collects ${x * i + y * j + more} for {cause}.",
        f"To pay for {cause}, ${x * i + y * j + more} is needed.",
    )
    s.say(
        f"{x} {a} give ${i} each and {y} {b} give ${j} each.",
        f"So far, {x} {a} have given ${i} each, and {y} {b} ${j} each.",
    )
    s.say("How much money is still missing?", "How much more is needed?")
    first, second = s.step(f"{x}*{i}", f"The {a} give $@."), s.step(f"{y}*{j}", f"The {b} give $@.")
    total = s.step(f"{first}+{second}", "Together that is $@.")
    s.step(f"{x * i + y * j + more}-{total}", "So $@ is still missing.", "The class still needs $@.")


def loan(s: Story) -> None:
    """Money lent with interest, paid back in equal parts."""
    p, rate, months = s.person(), s.rng.choice([5, 10, 20, 25, 50]), s.number(2, 10)
    amount = s.number(1, 10) * months * 20
    s.say(
        f"{p} borrows ${amount} and must pay back {rate}% more.",
        f"{s.person()} lends {p} ${amount} at {rate}% interest.",
    )
    s.say(
        f"{p.they} pays it back in {months} equal monthly payments. How much is each payment?",
        f"How much must {p.they} pay a month to pay it back in {months} months?",
    )
    extra = s.step(f"{amount}*{rate}/100", "The interest is $@.")
    total = s.step(f"{amount}+{extra}", f"{p} owes $@.", f"In all {p.they} pays back $@.")
    s.step(f"{total}/{months}", "Each payment is $@.", f"Every month {p.they} pays $@.")


def tickets(s: Story) -> None:
    """Adults and children pay different prices."""
    event = s.pick("zoo", "circus", "theater", "fair", "water park", "cinema")
    adult, people, young = s.number(5, 40), s.number(2, 9), s.number(2, 9)
    child = s.number(2, adult - 1)
    p, gap = s.person(), adult - child
    if s.rng.random() < 0.5:
        s.say(
            f"A ticket to the {event} costs ${adult} for adults and ${child} for children.",
            f"The {event} charges ${adult} for each adult and ${child} for each child.",
        )
    else:
        s.say(f"An adult ticket to the {event} costs ${adult}. A child's ticket is ${gap} cheaper.")
        s.step(f"{adult}-{gap}", "A child's ticket costs $@.")
    s.say(
        f"{p} goes there with a group of {people} adults and {young} children. How much do the tickets cost?",
        f"{people} adults and {young} children go. How much do they pay in total?",
    )
    a, b = (
        s.step(f"{people}*{adult}", "The adults' tickets cost $@."),
        s.step(f"{young}*{child}", "The children's tickets cost $@."),
    )
    s.step(f"{a}+{b}", "All tickets cost $@.", "In total that is $@.")


def budget(s: Story) -> None:
    """Parts of an income, one after another."""
    p, x, y = s.person(), s.number(2, 5), s.number(2, 5)
    pay = x * y * s.number(2, 12) * 10
    bills = s.number(5, max(5, pay // (2 * x * y)), 5)
    s.say(f"{p} earns ${pay} a month.", f"{p} gets ${pay} for {p.their} work.")
    s.say(
        f"{p.they} spends 1/{x} of it on rent and 1/{y} of what is left on food.",
        f"1/{x} of this goes to rent, and 1/{y} of the rest to food.",
    )
    rent = s.step(f"{pay}/{x}", f"{p} pays $@ for rent.")
    rest = s.step(f"{pay}-{rent}", "That leaves $@.")
    food = s.step(f"{rest}/{y}", "Food costs $@.")
    left = s.step(f"{rest}-{food}", f"Then {p.they} has $@.", "After that there is $@ left.")
    if s.rng.random() < 0.5 and bills < left:
        s.say(f"{p.they} also pays ${bills} in bills.")
        s.step(f"{left}-{bills}", "After the bills, there is $@ left.")
    s.say(f"How much money does {p} have left?", f"How much can {p} save?")


PRICE_SCENARIOS = [
    compare_prices,
    sale,
    restaurant,
    pay_rise,
    rental,
    subscription,
    cash,
    commission,
    fundraiser,
    loan,
    tickets,
    budget,
]
