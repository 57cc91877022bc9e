// Runs before the first paint, so that a chosen theme does not flash. It is no module, as modules
// run later.
(() => {
  const chosen = localStorage.getItem("parrot-theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
})();
