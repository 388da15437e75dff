// The ONNX parser's part of the twin.
#pragma once
#include "NvInfer.h"
#define NV_ONNX_PARSER_VERSION 1
namespace nvonnxparser {
struct IParserError {
    virtual char const* desc() const noexcept = 0;
};
struct IParser : nvinfer1::Base {
    virtual bool parse(void const* onnx, size_t bytes, char const* path = nullptr) noexcept = 0;
    virtual int32_t getNbErrors() const noexcept = 0;
    virtual IParserError const* getError(int32_t i) const noexcept = 0;
};
} // namespace nvonnxparser
