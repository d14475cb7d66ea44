// The dialog that asks for the API key, and says what is wrong with the one that was refused.

import { unsendable } from "../chat/api.js";
import { byId } from "./dom.js";

// Ask the user for a key; `refused` is the one that was sent, "" for none. Resolve to null if they cancel.
export function askKey(refused) {
  const dialog = byId("key-dialog");
  const field = byId("key-field");
  const say = (text) => (byId("key-message").textContent = text);
  byId("key-title").textContent = refused ? "The key was not accepted" : "This server asks for an API key";
  say(refused ? "The server does not know this key. Is a character missing, or was the key changed on the server?" : "");
  field.value = refused;
  field.type = "password";
  byId("key-show").checked = false;
  byId("key-show").onchange = () => (field.type = byId("key-show").checked ? "text" : "password");
  dialog.showModal();
  field.select();
  return new Promise((resolve) => {
    dialog.onclose = () => resolve(null);
    const accept = () => {
      const given = field.value.trim();
      const strange = unsendable(given);
      if (strange) return say(`A key has no spaces and only plain letters, digits and signs, but this one has “${strange}”.`);
      if (!given) return say("Enter the key, or cancel.");
      resolve(given);
      return dialog.close();
    };
    byId("key-cancel").onclick = () => dialog.close();
    byId("key-accept").onclick = accept;
    field.onkeydown = (event) => event.key === "Enter" && accept();
  });
}
