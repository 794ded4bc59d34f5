#!/usr/bin/env node
// Random texts and what the reference implementation makes of them: tests/golden/tokenizers/*/random.json.
// Needs node and the npm package "tokenizers" (0.23.2 made the committed files) below NODE_PATH.
//
// usage: make_token_vectors.js DIR ROWS SEED > DIR/random.json   (DIR holds tokenizer.json)
//
// Rows: {text, ids, ids_no_special, decoded, decoded_special}. The words are chosen for what pre-tokenizers,
// normalizers and BPE disagree on; characters newer than Unicode 14 are left out, since PCRE2 of Debian 12
// does not know them.
"use strict";
const fs = require("fs");
const { Tokenizer } = require("tokenizers");

const WORDS = [
  "the", "Hello", "don't", "'S", "'ll", "I'm", "'\u017f", "speak", "KING", "ROMEO", "aB", "Zz", "x", "<|", "|>", "<s", "</s", "<0x0A>",
  "1", "12", "1234", "\u00bd", "\u2167", "\u0663", "\u00b2", "\u3007", "\u2460", "\u0ad0", "\u19da",
  "\ufb01", "\u00c5", "\u00e9", "e\u0301", "a\u0323\u0301", "\u1e9b\u0323", "\uac01", "\u1100\u1161\u11a8", "\uff76\uff9e", "\ufdfa", "\u3231",
  "\u65e5", "\u4e2d", "\u30ab", "\u309d", "\u3005", "\u0e44\u0e17\u0e22", "\u0939\u093f", "\u05d0\u05b8", "\u0627\u0644", "\u01c5", "\u00df", "\u0130",
  "\u200d", "\ufe0f", "\u{1f469}", "\u{1f642}", "\u{1f1e9}\u{1f1ea}", "\u{1d400}", "\u{2f800}", "\u{20000}", "\u{10ffff}", "\ue000",
  " ", "  ", "   ", "\t", "\n", "\r\n", "\r", "\u00a0", "\u3000", "\u2028", "\u0085", "\u200b", "\u180e", "\ufeff",
  ".", "...", "!?", "$", "\u20ac", "+=", "_", "#", "{}", "[]", "/", "\\", "\"", "'", "\u0000", "\u0007", "\u00ad", "\u2581", "\uff1c", "\uff5c",
];

async function main() {
  const [dir, rows, seed] = process.argv.slice(2);
  const file = dir + "/tokenizer.json";
  const specials = JSON.parse(fs.readFileSync(file)).added_tokens.map((a) => a.content);
  const t = Tokenizer.fromFile(file);
  let state = Number(seed) >>> 0;
  const below = (n) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 4294967296) * n);
  };
  const out = [];
  for (let i = 0; i < Number(rows); i++) {
    let text = "";
    for (let k = 1 + below(14); k > 0; k--) {
      const what = below(10);
      if (what === 0) {
        text += specials[below(specials.length)];
      } else if (what === 1) {
        text += String.fromCodePoint(below(0x600));
      } else {
        text += (what < 4 ? " " : "") + WORDS[below(WORDS.length)];
      }
    }
    const ids = [...(await t.encode(text, null, { addSpecialTokens: true })).getIds()];
    const plain = [...(await t.encode(text, null, { addSpecialTokens: false })).getIds()];
    out.push(JSON.stringify({ text, ids, ids_no_special: plain, decoded: await t.decode(ids, true),
                              decoded_special: await t.decode(ids, false) })
      .replace(/[\u007f-\uffff]/g, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0")));
  }
  process.stdout.write("[" + out.join(",\n") + "]\n");
}

main();
