// Light or dark: what the user chose on any of the server's pages; without a choice, what the system has.

(() => {
  const root = document.documentElement, NAME = "tureen.theme";
  const isDark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  try {
    if (localStorage.getItem(NAME)) root.dataset.theme = localStorage.getItem(NAME);
  } catch { /* this browser keeps nothing: the choice lasts as long as the page */ }
  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme"), show = () => button.setAttribute("aria-pressed", String(isDark()));
    show();
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      try { localStorage.setItem(NAME, root.dataset.theme); } catch { /* as above */ }
      show();
    });
  });
})();
