// Finds out which model the server has, and keeps trying while it loads or is away.

import { pause, request } from "./api.js";
import { byId } from "./dom.js";

const AGAIN_S = 4;

// Show the state of the server beside its model's name: ready, loading or away.
function show(state, text) {
  const box = byId("server");
  box.dataset.state = state;
  byId("server-text").textContent = text;
  box.title = text;
}

// Give the first model of the server's list, once there is one.
export async function findModel() {
  show("loading", "Connecting");
  for (;;) {
    try {
      const response = await request("v1/models", { onwait: (why) => show("loading", why) });
      const model = (await response.json()).data?.[0];
      if (model) {
        show("ready", model.id);
        return model;
      }
      show("loading", "The server has no model yet");
    } catch (error) {
      show("away", error.message);
    }
    await pause(AGAIN_S);
  }
}
