"""The rules of the waiting queue, written without its data structures."""

from services.scheduler.core.request import Priority


class Naive:
    """The same rules without any of the bookkeeping: lists, and everything computed anew for each sample."""

    def __init__(self, ageing_ns):
        self.ageing_ns = ageing_ns
        self.flows = {}  # (priority, key): [samples, tag, order of joining]
        self.tags = {priority: {} for priority in Priority}  # of keys that do not wait
        self.peak = dict.fromkeys(Priority, 0)
        self.newcomers = dict.fromkeys(Priority, (0, 0))
        self.joined = 0

    def push(self, sample, *, front=False):
        priority, key = place = (sample.request.priority, sample.request.fairness_key)
        if place not in self.flows:
            tags = [flow[1] for (each, _), flow in self.flows.items() if each == priority]
            virtual = max(self.newcomers[priority][0], min(tags, default=self.peak[priority]))
            tag = self.tags[priority].pop(key, None)
            if tag is None or tag < virtual:
                at, joined = self.newcomers[priority]
                joined = joined if at == virtual else 0
                self.newcomers[priority] = virtual, joined + 1
                tag = virtual - 1 + joined
            self.flows[place] = [[], tag, self.joined]
            self.joined += 1
        samples = self.flows[place][0]
        samples.insert(0 if front else len(samples), sample)

    def leave(self, sample):
        priority, key = place = (sample.request.priority, sample.request.fairness_key)
        flow = self.flows[place]
        flow[0].remove(sample)
        if not flow[0]:
            del self.flows[place]
            self.tags[priority][key] = flow[1]
            self.peak[priority] = max(self.peak[priority], flow[1])
            if not any(p == priority for p, _ in self.flows):
                self.tags[priority].clear()

    def charge(self, priority, key, tokens):
        waiting = [flow[1] for (p, _), flow in self.flows.items() if p == priority]
        if not waiting:
            return
        if (flow := self.flows.get((priority, key))) is not None:
            flow[1] += tokens
            tag = flow[1]
        else:
            tag = self.tags[priority][key] = self.tags[priority].get(key, min(waiting)) + tokens
        self.peak[priority] = max(self.peak[priority], tag)

    def samples(self, priority=None):
        return [s for (p, _), flow in self.flows.items() if priority in (None, p) for s in flow[0]]

    def first(self, now_ns):
        def rank(priority):
            oldest = min(sample.accepted_ns for sample in self.samples(priority))
            return priority - (now_ns - oldest) // self.ageing_ns if self.ageing_ns else priority

        waiting = sorted({priority for priority, _ in self.flows})
        chosen = min(waiting, key=rank)
        if chosen != waiting[0]:
            return min(self.samples(chosen), key=lambda sample: (sample.accepted_ns, sample.arrival))
        flows = [flow for (priority, _), flow in self.flows.items() if priority == chosen]
        return min(flows, key=lambda flow: flow[1:])[0][0]

    def order(self, now_ns):
        copy = Naive(self.ageing_ns)
        copy.flows = {place: [list(flow[0]), *flow[1:]] for place, flow in self.flows.items()}
        order = []
        while copy.flows:
            order.append(sample := copy.first(now_ns))
            copy.flows[sample.request.priority, sample.request.fairness_key][1] += sample.cost
            copy.leave(sample)
        return order
