// The theme loads the search on every page, whereupon Sphinx takes every page for the search page and marks no words on the
// others. Here they are marked, and the first is brought into view. Escape takes the marks away.
"use strict";
window.addEventListener("load", async () => {
  if (document.getElementById("search-results")) return plainFormulas(document.getElementById("search-results"));
  const terms = (localStorage.getItem("sphinx_highlight_terms") || "").split(" ").filter(Boolean);
  localStorage.removeItem("sphinx_highlight_terms");
  if (!terms.length) return;
  await window.MathJax?.startup?.promise; // a mark inside a formula's source would spoil it
  const texts = document.querySelectorAll(".bd-article :is(h1, h2, h3, h4, p, li, dt, th, td)");
  for (const term of terms) for (const text of texts) _highlightText(text, term, "highlighted");
  const first = document.querySelector(".bd-article .highlighted");
  if (first && !location.hash) first.scrollIntoView({ block: "center" });
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") SphinxHighlight.hideSearchWords();
});

// An excerpt in the list of results holds the source of its formulas: \(d_\text{model}\) becomes d_model.
function plainFormulas(list) {
  const plain = (source) => source.replace(/\\\w+\{([^{}]*)\}/g, "$1").replace(/\\[,;! ]/g, " ").replace(/[\\{}]/g, "");
  const clean = () => {
    const walk = document.createTreeWalker(list, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
      const text = walk.currentNode.nodeValue;
      const better = text.replace(/\\\((.*?)(\\\)|$)/gs, (_, source) => plain(source));
      if (better !== text) walk.currentNode.nodeValue = better;
    }
  };
  new MutationObserver(clean).observe(list, { childList: true, subtree: true });
  clean();
}
