// The page: the API key, and a tab for each part of the console that this port has.

import { get, key } from "./api.js";
import { Live } from "./live.js";
import { Playground } from "./playground.js";

const byId = (id) => document.getElementById(id);

let asking = null; // the promise of the open key dialog

// Shows the key dialog and resolves when a key is entered. `problem` is the error of the previous key.
function askForKey(problem = "") {
  byId("key-problem").textContent = problem;
  if (asking === null) {
    asking = new Promise((resolve) => {
      const dialog = byId("key-dialog");
      dialog.oncancel = (event) => event.preventDefault(); // the page cannot be used without a key
      dialog.onclose = () => {
        key.set(byId("key").value.trim());
        byId("key").value = "";
        byId("forget-key").hidden = false;
        asking = null;
        resolve();
      };
      dialog.showModal();
    });
  }
  return asking;
}

// Runs `work`, and asks for another key each time the key is rejected.
async function withKey(work) {
  while (true) {
    try {
      return await work();
    } catch (error) {
      if (error.status !== 401) throw error;
      key.forget();
      await askForKey(error.message);
    }
  }
}

function show(name, parts) {
  for (const [other, part] of Object.entries(parts)) {
    const chosen = other === name;
    byId(other).hidden = !chosen;
    byId(`tab-${other}`).setAttribute("aria-selected", String(chosen));
    byId(`tab-${other}`).tabIndex = chosen ? 0 : -1;
    part.shown(chosen);
  }
  location.replace(`#${name}`);
}

function makeTabs(parts) {
  const names = Object.keys(parts);
  for (const [index, name] of names.entries()) {
    const tab = byId(`tab-${name}`);
    tab.hidden = false;
    tab.onclick = () => show(name, parts);
    tab.onkeydown = (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step === undefined) return;
      const next = names[(index + step + names.length) % names.length];
      show(next, parts);
      byId(`tab-${next}`).focus();
    };
  }
  const wanted = location.hash.slice(1);
  show(names.includes(wanted) ? wanted : names[0], parts);
}

async function start() {
  const config = await get("console/config");
  if (config.keys && !key.get()) await askForKey();
  byId("forget-key").hidden = !key.get();
  byId("forget-key").onclick = () => {
    key.forget();
    location.reload();
  };
  const parts = {};
  if (config.playground) parts.playground = new Playground(withKey);
  if (config.live) parts.live = new Live(withKey);
  makeTabs(parts);
}

start().catch((error) => {
  byId("status").textContent = error.message;
});
