
"use strict";
const find = document.getElementById("find"), found = document.getElementById("found");
find.oninput = () => {
  const wanted = find.value.trim().toLowerCase();
  let count = 0;
  for (const group of document.querySelectorAll("main > details")) {
    const isWhole = Boolean(wanted) && group.querySelector("summary").textContent.toLowerCase().includes(wanted);
    let inside = 0;
    for (const row of group.querySelectorAll("tbody tr")) {
      row.hidden = Boolean(wanted) && !isWhole && !row.cells[0].textContent.toLowerCase().includes(wanted);
      inside += row.hidden ? 0 : 1;
    }
    group.hidden = inside === 0;
    group.open = Boolean(wanted) && inside > 0;
    count += inside;
  }
  found.textContent = !wanted ? "" : count ? `${count} found` : `No field has “${find.value}” in its name.`;
};
