// SPDX-License-Identifier: Apache-2.0
// What TensorRT looks for in a plugin library: the list of creators, and where to send log messages.
#include "plugin_base.h"

namespace speccompile {
namespace {
trt::ILoggerFinder* logger_finder = nullptr;
}

void log_error(std::string const& text) noexcept {
    trt::ILogger* logger = logger_finder != nullptr ? logger_finder->findLogger() : nullptr;
    if (logger != nullptr) logger->log(trt::ILogger::Severity::kERROR, text.c_str());
}

}  // namespace speccompile

#define SPECCOMPILE_EXPORT extern "C" __attribute__((visibility("default")))

SPECCOMPILE_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) { speccompile::logger_finder = finder; }

SPECCOMPILE_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(std::int32_t& count) {
    static nvinfer1::IPluginCreatorInterface* const creators[] = {
        speccompile::spec_verify_creator(), speccompile::kv_rollback_creator()};
    count = 2;
    return creators;
}
