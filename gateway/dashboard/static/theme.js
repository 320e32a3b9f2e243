// Light, dark, or what the system says. A classic script in the head, so that the page is never painted in the wrong one.
(() => {
  const KEY = "kvgate.theme";
  const NEXT = { auto: "light", light: "dark", dark: "auto" };

  function chosen() {
    const kept = localStorage.getItem(KEY);
    return kept in NEXT ? kept : "auto";
  }

  function apply(theme) {
    document.documentElement.dataset.theme = theme;
  }

  apply(chosen());
  window.kvgateTheme = {
    get: chosen,
    next() {
      const theme = NEXT[chosen()];
      localStorage.setItem(KEY, theme);
      apply(theme);
      return theme;
    },
  };
})();
