// What axe (rules aria-dialog-name and scrollable-region-focusable) misses in the theme: a name for the search, and
// tables that scroll with the keyboard.
document$.subscribe(() => {
  document.querySelector("[data-md-component=search]")?.setAttribute("aria-label", "Search")
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) table.tabIndex = 0
})
