// runs before the first paint, so the page never flashes in the other theme
const chosen = (() => {
  try {
    return JSON.parse(localStorage.getItem("auraflux.settings"))?.theme;
  } catch {
    return null;
  }
})();
if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
