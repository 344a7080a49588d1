"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const say = (text) => { document.getElementById("said").textContent = text; };

  // Tables sort by a column's values where cells have them, else by their words; a second time the other way round.
  const value = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.v === undefined ? cell.textContent.trim() : Number(cell.dataset.v);
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
  for (const table of all("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const way = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", way);
        const rows = [...table.tBodies[0].rows].sort((a, b) => compare(value(a, column), value(b, column)));
        table.tBodies[0].append(...(way === "ascending" ? rows : rows.reverse()));
        say(`sorted by ${button.textContent.trim()}, ${way}`);
      });
    });
  }

  // A page opened from a disk or without leave has no clipboard; a selection can be copied there too.
  const copy = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      const done = document.execCommand("copy");
      area.remove();
      if (!done) throw new Error("the browser does not let this page copy");
    }
  };
  for (const button of all("button.copy")) {
    button.hidden = false;
    const label = button.firstChild;
    button.addEventListener("click", async () => {
      try {
        await copy(document.getElementById(button.dataset.copy).textContent);
        label.nodeValue = "copied";
        say("copied");
      } catch (error) {
        label.nodeValue = "not copied";
        say(error.message);
      }
      setTimeout(() => { label.nodeValue = "copy"; }, 1500);
    });
  }

  const unfold = document.getElementById("unfold");
  unfold.hidden = false;
  unfold.addEventListener("click", () => {
    const folded = all("details").some((one) => !one.open);
    for (const one of all("details")) one.open = folded;
    unfold.textContent = folded ? "fold all" : "unfold all";
  });
  const reveal = () => {
    const target = document.getElementById(location.hash.slice(1));
    if (target instanceof HTMLDetailsElement) target.open = true;
  };
  addEventListener("hashchange", reveal);
  reveal();

  const theme = document.getElementById("theme");
  const themes = ["system", "light", "dark"];
  theme.hidden = false;
  theme.addEventListener("click", () => {
    const next = themes[(themes.indexOf(document.documentElement.dataset.theme || "system") + 1) % themes.length];
    if (next === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    theme.textContent = `theme: ${next}`;
  });
})();
