// Asks the server for its model and retries while it loads or is unreachable.

import { pause, request } from "./api.js";
import { byId } from "../view/dom.js";

const RETRY_S = 4;

// Show the state of the server: ready, loading or away.
function show(state, text) {
  const box = byId("server");
  box.dataset.state = state;
  byId("server-text").textContent = text;
  box.title = text;
}

// Return the first model of the server's list, once there is one.
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
    await pause(RETRY_S);
  }
}
