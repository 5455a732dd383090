// Runs before the first paint, so that a page in the dark does not flash white. Everything else is in modules.
(() => {
  try {
    const kept = localStorage.getItem("aioflow-theme");
    if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
  } catch {
    // Storage is forbidden here: the system's preference holds.
  }
})();
