// What this page has running, by request id: the live view stops it, too.

const running = new Map();

export function begin(controller) {
  const entry = { id: null, controller };
  return {
    named(id) {
      entry.id = id;
      running.set(id, entry);
    },
    end() {
      if (entry.id !== null) running.delete(entry.id);
    },
  };
}

// The one that a scheduler knows as `id`: that of a prompt of several, or of what went on elsewhere, has more behind it.
export function find(id) {
  for (const [own, entry] of running) {
    if (id === own || (id.startsWith(own) && "+-".includes(id[own.length]))) return entry.controller;
  }
  return null;
}
