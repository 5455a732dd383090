// Where the endpoint guards reading: asks for its token, which the page forgets when it is closed.

import { h } from "./dom.js";
import { useToken } from "./store.js";

const field = { value: "" };

export function unlock(store) {
  return h("section", { class: "panel unlock" }, h("form", {
    onsubmit: (event) => {
      event.preventDefault();
      useToken(field.value);
      store.refresh();
    },
  },
    h("h1", null, "This endpoint asks for its token"),
    h("p", null, h("label", { for: "token" }, "Token"), h("input", {
      id: "token", type: "password", autocomplete: "off", required: true, oninput: (event) => { field.value = event.target.value; },
    })),
    h("p", { class: "choice" }, h("button", { class: "main" }, "Show"))));
}
