# SPDX-License-Identifier: Apache-2.0
"""transformers models and speculator networks -> neutral graphs; torch is needed to run it, not to import a source."""
