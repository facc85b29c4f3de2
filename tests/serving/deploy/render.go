// SPDX-License-Identifier: Apache-2.0

// Renders a chart's templates with Go's text/template, which Helm uses, and those of Helm's functions that our chart
// calls. Any other function is an error, and so is a missing value.
//
//	render < {"templates": {NAME: TEXT}, "data": {"Values": ..., "Chart": ..., "Release": ...}} > {NAME: TEXT}
package main

import (
	"bytes"
	"encoding/json"
	"log"
	"maps"
	"os"
	"slices"
	"strings"
	"text/template"
)

type input struct {
	Templates map[string]string
	Data      map[string]any
}

func main() {
	var given input
	check(json.NewDecoder(os.Stdin).Decode(&given))
	all := template.New("chart").Option("missingkey=error")
	all.Funcs(template.FuncMap{
		"include": func(name string, data any) (string, error) {
			var text bytes.Buffer
			err := all.ExecuteTemplate(&text, name, data)
			return text.String(), err
		},
		"toYaml": func(value any) string { return strings.Join(yaml(value), "\n") },
		"nindent": func(width int, text string) string {
			pad := strings.Repeat(" ", width)
			return "\n" + pad + strings.ReplaceAll(text, "\n", "\n"+pad)
		},
		"quote": func(value any) (string, error) {
			text, err := json.Marshal(value)
			return string(text), err
		},
		"default": func(fallback any, value any) any {
			if value == nil || value == "" {
				return fallback
			}
			return value
		},
		"trunc": func(most int, text string) string { return text[:min(most, len(text))] },
		"trimSuffix": func(end, text string) string { return strings.TrimSuffix(text, end) },
	})
	for name, text := range given.Templates {
		template.Must(all.New(name).Parse(text))
	}
	rendered := map[string]string{}
	for name := range given.Templates {
		var text bytes.Buffer
		check(all.ExecuteTemplate(&text, name, given.Data))
		rendered[name] = text.String()
	}
	check(json.NewEncoder(os.Stdout).Encode(rendered))
}

// The lines of a value in block style; scalars and empty collections as JSON, which is YAML too.
func yaml(value any) []string {
	lines := []string{}
	indent := func(first string, below any) {
		part := yaml(below)
		_, isMap := below.(map[string]any)
		_, isList := below.([]any)
		if strings.HasSuffix(first, ":") && (isMap || isList) && part[0] != "{}" && part[0] != "[]" {
			lines = append(lines, first)
		} else {
			lines = append(lines, first+" "+part[0])
			part = part[1:]
		}
		for _, line := range part {
			lines = append(lines, "  "+line)
		}
	}
	switch kind := value.(type) {
	case map[string]any:
		for _, key := range slices.Sorted(maps.Keys(kind)) {
			name, err := json.Marshal(key)
			check(err)
			indent(string(name)+":", kind[key])
		}
		if len(kind) > 0 {
			return lines
		}
	case []any:
		for _, entry := range kind {
			indent("-", entry)
		}
		if len(kind) > 0 {
			return lines
		}
	}
	text, err := json.Marshal(value)
	check(err)
	return []string{string(text)}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
