// What axe (rules aria-dialog-name and scrollable-region-focusable) misses in the theme: a name for the search, and
// tables and code that scroll with the keyboard.
document$.subscribe(() => {
  document.querySelector("[data-md-component=search]")?.setAttribute("aria-label", "Search")
  for (const wide of document.querySelectorAll(".md-typeset :is(.md-typeset__scrollwrap, pre > code)")) wide.tabIndex = 0
})
