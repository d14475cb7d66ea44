// On narrow screens the list of conversations slides in over the page; on wide ones it is a column.

import { byId } from "./dom.js";

const narrow = matchMedia("(max-width: 819px)");

function set(open) {
  const drawer = byId("sidebar");
  document.body.classList.toggle("drawer-open", open && narrow.matches);
  drawer.inert = narrow.matches && !open;
  byId("main").inert = narrow.matches && open;
  byId("menu").ariaExpanded = String(open);
}

export function closeDrawer() {
  if (!document.body.classList.contains("drawer-open")) return;
  set(false);
  byId("menu").focus();
}

// capture the key first: Escape also stops an answer
function closeByKey(event) {
  if (event.key !== "Escape" || !document.body.classList.contains("drawer-open")) return;
  event.stopPropagation();
  closeDrawer();
}

// Show the list, and focus an element of it.
export function openDrawer(focused) {
  if (narrow.matches) set(true);
  byId(focused).focus();
}

export function startDrawer() {
  byId("menu").addEventListener("click", () => openDrawer("close-drawer"));
  byId("close-drawer").addEventListener("click", closeDrawer);
  byId("scrim").addEventListener("click", closeDrawer);
  // close before the dialog opens, because the dialog returns focus on close
  byId("open-settings").addEventListener("click", closeDrawer, { capture: true });
  addEventListener("keydown", closeByKey, { capture: true });
  narrow.addEventListener("change", () => set(false));
  set(false);
}
