"""The rules of the waiting queue, written without its data structures."""

from services.scheduler.core.request import Priority


class Naive:
    """The same rules without any of the bookkeeping: lists, and everything computed anew for each sample."""

    def __init__(self, ageing_ns):
        self.ageing_ns = ageing_ns
        self.flows = {}  # (priority, key): [samples, tag, order of joining]
        self.tags = {priority: {} for priority in Priority}  # of keys that do not wait
        self.newest = dict.fromkeys(Priority, 0)
        self.joined = 0

    def push(self, sample, *, front=False):
        priority, key = place = (sample.request.priority, sample.request.fairness_key)
        if place not in self.flows:
            virtual = min((flow[1] for (each, _), flow in self.flows.items() if each == priority), default=0)
            tag = self.tags[priority].pop(key, None)
            if tag is None or tag < virtual:
                tag = self.newest[priority] = max(virtual, self.newest[priority] + 1)
            self.joined += 1
            self.flows[place] = [[], tag, self.joined]
        samples = self.flows[place][0]
        samples.insert(0 if front else len(samples), sample)

    def leave(self, sample):
        priority, key = place = (sample.request.priority, sample.request.fairness_key)
        flow = self.flows[place]
        flow[0].remove(sample)
        if not flow[0]:
            del self.flows[place]
            self.tags[priority][key] = flow[1]
            if not any(p == priority for p, _ in self.flows):
                self.tags[priority].clear()
                self.newest[priority] = 0

    def charge(self, priority, key, tokens):
        waiting = [flow[1] for (p, _), flow in self.flows.items() if p == priority]
        if not waiting:
            return
        if (flow := self.flows.get((priority, key))) is not None:
            flow[1] += tokens
        else:
            self.tags[priority][key] = self.tags[priority].get(key, min(waiting)) + tokens

    def samples(self, priority=None):
        return [s for (p, _), flow in self.flows.items() if priority in (None, p) for s in flow[0]]

    def overdue(self, most_low=None):
        """The samples that age lets go before those of the highest class."""

        def rank(sample):
            return sample.accepted_ns + sample.request.priority * self.ageing_ns

        if not self.ageing_ns or not self.flows:
            return []
        highest = min(priority for priority, _ in self.flows)
        oldest = min(rank(flow[0][0]) for (priority, _), flow in self.flows.items() if priority == highest)
        lower = [list(flow[0]) for (priority, _), flow in self.flows.items() if priority != highest]
        found = []
        while True:
            low = sum(sample.request.priority == Priority.LOW for sample in found)
            heads = [samples for samples in lower if samples and rank(samples[0]) < oldest]
            heads = [each for each in heads if each[0].request.priority != Priority.LOW or low != most_low]
            if not heads:
                return found
            found.append(min(heads, key=lambda samples: (rank(samples[0]), samples[0].arrival)).pop(0))

    def order(self, most_low=None):
        copy = Naive(self.ageing_ns)
        copy.flows = {place: [list(flow[0]), *flow[1:]] for place, flow in self.flows.items()}
        order = []
        for sample in self.overdue(most_low):
            copy.serve(sample)
            order.append(sample)
        while copy.flows:
            highest = min(priority for priority, _ in copy.flows)
            flows = [flow for (priority, _), flow in copy.flows.items() if priority == highest]
            sample = min(flows, key=lambda flow: (flow[1], -flow[2]))[0][0]
            copy.serve(sample)
            order.append(sample)
        return order

    def serve(self, sample):
        self.flows[sample.request.priority, sample.request.fairness_key][1] += sample.request.cost
        self.leave(sample)
