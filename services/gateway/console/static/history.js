// Rates and page use of the last two minutes, since the page was opened.

export const HISTORY_S = 120;
const COUNTERS = { out: "generated_tokens", in: "prompt_tokens", reused: "cached_prompt_tokens" };

export class History {
  constructor() {
    this.last = new Map(); // by scheduler id: the latest counters
    this.rates = []; // { at, out, in, reused }: tokens per second of all replicas
    this.pages = new Map(); // by address: [[at, share of the pages in use]]
    this.hydragen = null; // share of rows in Hydragen groups
  }

  add(state) {
    const grown = { batch_rows: 0, hydragen_rows: 0 };
    const rates = { out: 0, in: 0, reused: 0 };
    let compared = false;
    for (const replica of state.replicas) {
      if (replica.load === null) continue;
      const { counters, total_pages, in_use_pages } = replica.load;
      const before = this.last.get(replica.scheduler_id);
      if (before && replica.at > before.at) {
        compared = true;
        for (const name of Object.keys(grown)) grown[name] += counters[name] - before.counters[name];
        const passed = replica.at - before.at;
        for (const [name, counter] of Object.entries(COUNTERS)) {
          rates[name] += (counters[counter] - before.counters[counter]) / passed;
        }
      }
      this.last.set(replica.scheduler_id, { at: replica.at, counters });
      const used = this.pages.get(replica.address) ?? [];
      if (total_pages) used.push([replica.at, in_use_pages / total_pages]);
      this.pages.set(replica.address, used.filter(([at]) => at > state.at - HISTORY_S));
    }
    if (compared) this.rates.push({ at: state.at, ...rates });
    this.rates = this.rates.filter(({ at }) => at > state.at - HISTORY_S);
    if (grown.batch_rows > 0) this.hydragen = grown.hydragen_rows / grown.batch_rows;
  }

  // Returns the mean rate of the last seconds, since a single step has many tokens or none.
  recent(name, now, over = 3) {
    const some = this.rates.filter(({ at }) => at > now - over);
    return some.length ? some.reduce((sum, each) => sum + each[name], 0) / some.length : null;
  }
}
