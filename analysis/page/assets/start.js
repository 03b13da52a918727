/* Starts a page that is written once. */
"use strict";

const page = new Page();
page.show(JSON.parse(document.querySelector("#payload").textContent));
page.clients.openFromAddress();
