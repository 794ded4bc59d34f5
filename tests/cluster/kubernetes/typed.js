// Prints a TypeScript program that has the objects of a manifest as constants of Kubernetes' types: the compiler then
// finds a field that is missing, misspelt or of another type.
const yaml = require('js-yaml');
const objects = yaml.loadAll(require('fs').readFileSync(0, 'utf8'));
objects.forEach((o, i) => console.log(`import {I${o.kind} as T${i}} from 'kubernetes-models/${o.apiVersion}/${o.kind}';`));
objects.forEach((o, i) => console.log(`export const o${i}: T${i} = ${JSON.stringify(o, null, 1)};`));
