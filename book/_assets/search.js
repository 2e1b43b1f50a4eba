// The theme loads the search on every page, whereupon Sphinx takes every page for the search page and marks no words on the
// others. Here they are marked, and the first is brought into view. Escape takes the marks away.
"use strict";
window.addEventListener("load", async () => {
  if (document.getElementById("search-results")) return;
  const terms = (localStorage.getItem("sphinx_highlight_terms") || "").split(" ").filter(Boolean);
  localStorage.removeItem("sphinx_highlight_terms");
  if (!terms.length) return;
  const texts = document.querySelectorAll(".bd-article :is(h1, h2, h3, h4, p, li, dt, th, td)");
  for (const term of terms) for (const text of texts) _highlightText(text, term, "highlighted");
  const first = document.querySelector(".bd-article .highlighted");
  if (first && !location.hash) first.scrollIntoView({ block: "center" });
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") SphinxHighlight.hideSearchWords();
});

// The list of results. An excerpt is cut from the article alone, without folded code, figures and displayed formulas, with
// the other formulas in plain letters: \(d_\text{model}\) becomes d_model. Titles with formulas are made plain too.
document.addEventListener("DOMContentLoaded", () => {
  const results = document.getElementById("search-results");
  if (!results) return;
  Search.htmlToText = (html, anchor) => {
    const page = new DOMParser().parseFromString(html, "text/html");
    page.querySelectorAll(".headerlink, script, style, details, .ngx, div.math").forEach((part) => part.remove());
    page.querySelectorAll("span.math").forEach((formula) => (formula.textContent = plain(formula.dataset.tex ?? formula.textContent)));
    page.querySelectorAll("dt, dd").forEach((part) => part.append(" "));
    const part = (anchor && page.getElementById(anchor.slice(1))) || page.querySelector(".bd-article") || page.body;
    return part.textContent.replace(/\s+/g, " ");
  };
  const titles = () => {
    for (const link of results.querySelectorAll("li > a")) {
      if (link.textContent.includes("\\")) link.textContent = plain(link.textContent);
    }
  };
  new MutationObserver(titles).observe(results, { childList: true, subtree: true });
});

const SIGNS = { cdot: "·", times: "×", odot: "⊙", leftarrow: "←", le: "≤", ge: "≥", approx: "≈", in: "∈" };
SIGNS.lVert = SIGNS.rVert = "‖";

function plain(source) {
  let before;
  do {
    before = source; // from the innermost braces outwards
    source = source
      .replace(/\\(?:text|operatorname|math\w+)\s*\{([^{}]*)\}/g, "$1")
      .replace(/([_^])\{([^{}]*)\}/g, "$1$2")
      .replace(/\\sqrt\{([^{}]*)\}/g, "sqrt($1)")
      .replace(/\\frac\{([^{}]*)\}\{([^{}]*)\}/g, "$1/$2");
  } while (source !== before);
  return source
    .replace(/\\(?:math\w+|[bB]igg?[lr]?|left|right)(?![a-zA-Z])\s*/g, "")
    .replace(/\\([a-zA-Z]+)/g, (_, name) => SIGNS[name] ?? name)
    .replace(/\\[,;! ]/g, " ")
    .replace(/\\[()]|[\\{}]/g, "");
}
