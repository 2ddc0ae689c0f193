"use strict";
/* Groups of the list of runs, and the tags and notes of a run. */

const BY_FOLDER = "folder", BY_TAG = "tag";

/* Return the name of a run's group. */
function groupOf(run) {
  if (state.group === BY_FOLDER) return run.url.split("/").slice(-2)[0] || "/";
  if (state.group === BY_TAG) return run.tags.join(", ") || "no tag";
  return `${state.group.split(".").pop()} ${text(state.settings[run.id]?.[state.group])}`;
}
/* Return the items of the list: under a heading for each group, which shows or hides its runs. */
function grouped(runs, item) {
  if (!state.group) return runs.map(item);
  const groups = new Map();
  for (const run of runs) groups.set(groupOf(run), [...(groups.get(groupOf(run)) || []), run]);
  return [...groups].sort(([a], [b]) => byNumber(a, b)).flatMap(([name, members]) => {
    const visible = members.filter(run => !state.hidden.has(run.id)).length;
    const box = el("input", { type: "checkbox", checked: visible === members.length, "aria-label": `show the group ${name}`,
      onchange: event => { members.forEach(run => event.target.checked ? state.hidden.delete(run.id) : state.hidden.add(run.id)); changed(); } });
    box.indeterminate = visible > 0 && visible < members.length;
    return [el("li", { class: "group" }, box, name, el("small", {}, `${visible} of ${members.length}`)), ...members.map(item)];
  });
}
function groupChoice() {
  const keys = [["", "no groups"], [BY_FOLDER, "folder"], [BY_TAG, "tag"], ...differing(state.runs).filter(key => !key.startsWith("mixture.sources")).map(key => [key, key])];
  if (state.group && !keys.some(([key]) => key === state.group)) keys.push([state.group, state.group]);
  const drawn = JSON.stringify([keys, state.group]);
  if (drawn === $("group").dataset.drawn) return; // an open list would close
  $("group").dataset.drawn = drawn;
  anew($("group"), () => $("group").replaceChildren(el("label", { class: "which" }, "group by ", el("select", { "aria-label": "group runs by", onchange: event => { state.group = event.target.value; changed(); } },
    ...keys.map(([key, name]) => el("option", { value: key, selected: key === state.group }, name))))));
}

/* The form of a run's tags and note. What a person has typed and not saved stays when the view is drawn anew. */
const drafts = new Map();
function notesForm(run) {
  const draft = drafts.get(run.id) || { tags: run.tags.join(", "), note: run.note };
  const keep = () => drafts.set(run.id, { tags: tags.value, note: note.value });
  const tags = el("input", { type: "text", value: draft.tags, placeholder: "words, with commas between", "aria-label": "tags", oninput: keep });
  const note = el("textarea", { rows: 6, "aria-label": "note", oninput: keep }, draft.note), said = el("span", { class: "note", role: "status" });
  const save = async () => {
    const body = JSON.stringify({ tags: tags.value.split(",").map(tag => tag.trim()).filter(Boolean), note: note.value });
    try {
      const answer = await fetch(`api/notes/${run.id}`, { method: "POST", headers: { "Content-Type": "application/json" }, body });
      if (!answer.ok) throw new Error(await answer.text());
      Object.assign(runOf(run.id) || run, await answer.json());
      drafts.delete(run.id);
      said.textContent = "saved in notes.yaml of the run's folder";
      drawRuns();
    } catch (error) { said.textContent = `not saved: ${error.message}`; }
  };
  return el("div", { class: "notes" }, el("label", {}, "tags ", tags), el("label", {}, "note ", note), el("p", {}, el("button", { id: "save", onclick: save }, "save"), " ", said));
}
