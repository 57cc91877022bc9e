// Runs before the first paint, so that a chosen theme does not flash. No module: those run later.
(() => {
  const chosen = localStorage.getItem("parrot-theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
})();
