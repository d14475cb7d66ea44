// runs before the first paint, so that a chosen theme never flashes the other one
const chosen = (() => {
  try {
    return JSON.parse(localStorage.getItem("auraflux.settings"))?.theme;
  } catch {
    return null;
  }
})();
if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
