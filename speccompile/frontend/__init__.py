# SPDX-License-Identifier: Apache-2.0
"""From a transformers checkpoint to a neutral graph. Importing this package needs neither torch nor transformers."""
