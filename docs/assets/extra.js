// Names for a screen reader that the theme leaves out: the search, and one for each nested list.
const search = document.querySelector(".md-search");
if (search) search.setAttribute("aria-label", "Search");
const name = () => document.querySelectorAll(".md-nav .md-nav, .md-code__nav").forEach((part, i) => {
  if (part.dataset.named) return;
  const title = part.querySelector(".md-nav__title")?.textContent.trim() || "Code";
  part.dataset.named = "yes";
  part.removeAttribute("aria-labelledby");
  part.setAttribute("aria-label", `${title}, part ${i + 1}`);
});
name();
new MutationObserver(name).observe(document.body, { childList: true, subtree: true });
