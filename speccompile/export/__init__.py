# SPDX-License-Identifier: Apache-2.0
"""transformers models and speculator networks -> neutral graphs; needs torch to run, not to import a source."""
