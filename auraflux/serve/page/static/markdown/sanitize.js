// Passes every element that holds model output through the vendored DOMPurify.
//
// The elements are built from tokens and sanitized in place. No markup string is ever parsed, so the page's policy can
// forbid every trusted-types policy, DOMPurify's own included.

import "../vendor/purify.min.js";

const purify = globalThis.DOMPurify;

purify.setConfig({
  IN_PLACE: true,
  TRUSTED_TYPES_POLICY: null,
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "div", "em", "h3", "h4", "h5", "h6", "hr", "input", "li", "ol", "p", "pre", "span",
    "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["aria-label", "checked", "class", "disabled", "href", "start", "type"],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  // a link leads to a web page or a mailbox; relative addresses would lead into this server
  ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i,
  ADD_URI_SAFE_ATTR: ["aria-label", "checked", "disabled", "start", "type"],
});

// Remove from `element` all tags, attributes and addresses that are not allowed, and return it.
export function sanitize(element) {
  return purify.sanitize(element);
}
