// Keeps the id of the open conversation in the address, so that reloading and the browser's back button return to it.

export const idOfAddress = () => decodeURIComponent(location.hash.slice(1));

// Show `id` in the address; "" for none. `added` makes a new entry in the browser's history.
export function setAddress(id, added = false) {
  if (idOfAddress() === id) return;
  const url = id ? `#${id}` : location.pathname + location.search;
  if (added) history.pushState(null, "", url);
  else history.replaceState(null, "", url);
}

export function onAddress(changed) {
  addEventListener("popstate", () => changed(idOfAddress()));
}
