// Requests that this page runs, by request id. The live view can stop them, too.

const running = new Map();

export function track(controller) {
  const entry = { id: null, controller };
  return {
    setId(id) {
      entry.id = id;
      running.set(id, entry);
    },
    end() {
      if (entry.id !== null) running.delete(entry.id);
    },
  };
}

// Returns the controller of the request that a scheduler lists as `id`. That id has a suffix if the request has several
// prompts or was moved by failover.
export function find(id) {
  for (const [own, entry] of running) {
    if (id === own || (id.startsWith(own) && "+-".includes(id[own.length]))) return entry.controller;
  }
  return null;
}
